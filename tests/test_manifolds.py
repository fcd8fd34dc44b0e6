"""One table of manifolds and shapes, shared invariants, and each formula against an independent one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import geoopt
import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from manifold_tying import SPD, Stiefel, linalg
from manifold_tying.manifolds import Retraction, nearest_spd
from manifold_tying.manifolds._stiefel import cayley_step

RETRACTIONS = get_args(Retraction)
SEEDS = range(3)


@dataclass(frozen=True)
class Case:
    manifold: Any
    shape: tuple[int, ...]
    order: int  # of the retraction: it is O(t^order) from the geodesic

    def __str__(self) -> str:
        kind = self.manifold.retraction if isinstance(self.manifold, Stiefel) else "spd"
        return f"{kind}-{getattr(self.manifold, 'terms', '')}-{'x'.join(map(str, self.shape))}"


STIEFEL_SHAPES = [(7, 3), (4, 4), (6, 1), (2, 3, 6, 2)]
STIEFEL = [
    Case(manifold, shape, order)
    for manifold, order in [
        (Stiefel("polar"), 3),
        (Stiefel("qr"), 2),
        (Stiefel("cayley"), 2),
        (Stiefel("cayley-neumann"), 2),
        (Stiefel("cayley-neumann", terms=3), 2),
    ]
    for shape in STIEFEL_SHAPES
]
POSITIVE = [Case(SPD(), shape, 3) for shape in [(4, 4), (1, 1), (2, 3, 3, 3)]]
CASES = STIEFEL + POSITIVE
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_stiefel = pytest.mark.parametrize("case", STIEFEL, ids=str)
every_spd = pytest.mark.parametrize("case", POSITIVE, ids=str)


def draw(case: Case, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """A point, a tangent vector there and an ambient vector."""
    torch.manual_seed(seed)
    x = case.manifold.random(*case.shape, dtype=dtype).detach().as_subclass(Tensor)
    v = torch.randn(case.shape, dtype=dtype)
    u = case.manifold.proju(x, v)
    # Of length 1 in SPD, where an ordinary one of an ill-conditioned x can be a long way, exponentially far in entries.
    return x, u if isinstance(case.manifold, Stiefel) else u / case.manifold.inner(x, u, keepdim=True).sqrt(), v


def off_manifold(manifold: Any, x: Tensor) -> float:
    """How far x is from fulfilling the definition; infinite where it is not positive definite or not finite."""
    X = x.detach().double().numpy()
    if not np.isfinite(X).all():
        return math.inf
    if isinstance(manifold, Stiefel):
        return float(np.abs(np.swapaxes(X, -1, -2) @ X - np.eye(X.shape[-1])).max())
    if not (np.linalg.eigvalsh(X) > 0).all():
        return math.inf
    return float(np.abs(X - np.swapaxes(X, -1, -2)).max() / np.abs(X).max())


def off_tangent(manifold: Any, x: Tensor, u: Tensor) -> float:
    product = x.mT @ u if isinstance(manifold, Stiefel) else u
    return float((product + product.mT if isinstance(manifold, Stiefel) else product - product.mT).abs().max())


def frobenius(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-1, -2))


def close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


# ---- shared invariants


def test_the_measures_see_points_and_vectors_that_are_off() -> None:
    for case in CASES:
        x, u, v = draw(case, 0)
        assert off_manifold(case.manifold, x) < 1e-12
        assert off_manifold(case.manifold, -2 * x) > 1
        assert off_manifold(case.manifold, x * math.nan) == math.inf
        if case.shape != (1, 1):
            assert off_tangent(case.manifold, x, u) < 1e-12 < 1e-3 < off_tangent(case.manifold, x, v)


@every_case
def test_projx_lands_on_the_manifold_and_keeps_its_points(case: Case) -> None:
    for seed in SEEDS:
        x, _, v = draw(case, seed)
        v[..., 0, 0] = v[..., 0, 0].abs() + 0.1  # a positive eigenvalue, which the positive definite matrices ask for
        y = case.manifold.projx(v)
        assert off_manifold(case.manifold, y) < 1e-12
        close(case.manifold.projx(y), y)
        close(case.manifold.projx(x), x)


@every_case
def test_projx_is_the_nearest_point(case: Case) -> None:
    for seed in SEEDS:
        x, u, v = draw(case, seed)
        outside = x + 0.1 * v
        nearest = case.manifold.projx(outside)
        distance = frobenius(outside - nearest, outside - nearest)
        for step in (1e-3, 1e-1):
            other = case.manifold.expmap(nearest, case.manifold.proju(nearest, u) * step)
            assert (frobenius(outside - other, outside - other) >= distance - 1e-14).all()


@every_case
def test_proju_is_an_orthogonal_projection_to_the_tangent_space(case: Case) -> None:
    for seed in SEEDS:
        x, u, v = draw(case, seed)
        assert off_tangent(case.manifold, x, u) < 1e-12
        close(case.manifold.proju(x, u), u)
        _, other, _ = draw(case, seed + 100)
        close(frobenius(v - case.manifold.proju(x, v), case.manifold.proju(x, other)), 0)


@every_case
def test_egrad2rgrad_is_the_gradient_for_the_metric(case: Case) -> None:
    for seed in SEEDS:
        x, u, v = draw(case, seed)
        gradient = case.manifold.egrad2rgrad(x, v)
        assert off_tangent(case.manifold, x, gradient) < 1e-11
        close(case.manifold.inner(x, gradient, u), frobenius(v, u), atol=1e-10)


@every_case
@pytest.mark.parametrize("size", [0.0, 1e-9, 0.1, 1.0, 2.0, 10.0, 1e4])
def test_retraction_stays_on_the_manifold(case: Case, size: float) -> None:
    for seed in SEEDS:
        x, u, _ = draw(case, seed)
        norms = torch.linalg.matrix_norm(u, 2)[..., None, None].clamp_min(1e-300)
        y = case.manifold.retr(x, u / norms * size)
        assert off_manifold(case.manifold, y) < 1e-12
        if size == 0:
            close(y, x)
        elif size <= 1:
            assert (y - x).abs().max() > 0.1 * min(size, 1)  # it moved


@every_stiefel
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 2.0, 30.0, 1e4])
def test_retraction_in_float32_keeps_the_promised_defect(case: Case, size: float) -> None:
    for seed in SEEDS:
        x, u, _ = draw(case, seed, torch.float32)
        y = case.manifold.retr(x, u / torch.linalg.matrix_norm(u, 2)[..., None, None].clamp_min(1e-30) * size)
        assert linalg.defect(y).max() <= 1e-6


@every_stiefel
def test_retraction_corrects_a_defect_that_the_point_had(case: Case) -> None:
    x, u, _ = draw(case, 0)
    assert off_manifold(case.manifold, case.manifold.retr(x * 1.01, 0.1 * u)) < 1e-12


def order_of_agreement(case: Case, step: Callable[[Tensor, Tensor], Tensor], seed: int) -> float:
    """Slope of log ‖step(x, t u) - expmap(x, t u)‖ over log t."""
    x, u, _ = draw(case, seed)
    times = np.logspace(-2.5, -1.5, 5)
    # The vectors of a batch differ; the largest error rules.
    errors = [torch.linalg.matrix_norm(step(x, t * u) - case.manifold.expmap(x, t * u)).max().item() for t in times]
    return math.inf if max(errors) < 1e-14 else float(np.polyfit(np.log(times), np.log(errors), 1)[0])


@every_case
def test_retraction_agrees_with_the_geodesic_to_its_order(case: Case) -> None:
    for seed in SEEDS:
        # 0.1 for the next order at t = 0.03
        assert order_of_agreement(case, case.manifold.retr, seed) > case.order - 0.1
        if case.shape != (1, 1):
            wrong = order_of_agreement(case, lambda x, u: case.manifold.retr(x, 1.2 * u), seed)
            assert wrong < 1.5  # a step a fifth too long agrees to no order


def test_only_the_polar_retraction_is_of_second_order() -> None:
    orders = {r: order_of_agreement(Case(Stiefel(r), (7, 3), 0), Stiefel(r).retr, 0) for r in RETRACTIONS}
    assert orders["polar"] > 2.9
    assert orders["qr"] < 2.1 and orders["cayley"] < 2.1


@every_case
def test_transport_lands_in_the_new_tangent_space(case: Case) -> None:
    for seed in SEEDS:
        x, u, v = draw(case, seed)
        y = case.manifold.retr(x, u)
        moved = case.manifold.transp(x, y, case.manifold.proju(x, v))
        assert off_tangent(case.manifold, y, moved) < 1e-11
        if isinstance(case.manifold, Stiefel):
            assert off_tangent(case.manifold, y, v) > 1e-3


@every_case
def test_random_and_origin_are_on_the_manifold(case: Case) -> None:
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        x = case.manifold.random(*case.shape, dtype=dtype)
        assert isinstance(x, geoopt.ManifoldTensor) and x.manifold is case.manifold
        assert x.shape == case.shape and x.dtype == dtype
        assert off_manifold(case.manifold, x) < (1e-6 if dtype == torch.float32 else 1e-12)
        assert case.shape == (1, 1) or not torch.equal(x, case.manifold.random(*case.shape, dtype=dtype))
        origin = case.manifold.origin(*case.shape, dtype=dtype)
        assert origin.dtype == dtype and origin.is_contiguous()
        close(origin, np.broadcast_to(np.eye(case.shape[-2], case.shape[-1]), case.shape), atol=0)
    assert case.manifold.random(case.shape).shape == case.shape  # as one tuple, too


@every_case
def test_geoopts_checks_tell_points_and_vectors_from_others(case: Case) -> None:
    x, u, v = draw(case, 0)
    manifold = case.manifold
    assert manifold.check_point_on_manifold(x)
    assert not manifold.check_point_on_manifold(-x * 1.1)
    assert not manifold.check_point_on_manifold(x * math.nan)
    assert manifold.check_vector_on_tangent(x, u)
    assert manifold.check_vector_on_tangent(x, u, ok_point=True)
    if case.shape != (1, 1):
        assert not manifold.check_vector_on_tangent(x, v)
    ok, reason = manifold.check_point_on_manifold(-x * 1.1, explain=True)
    assert not ok and reason
    with pytest.raises(ValueError, match="not"):
        manifold.assert_check_point_on_manifold(x * math.nan)


@pytest.mark.parametrize(
    ("manifold", "shape"), [(Stiefel(), (2, 5)), (SPD(), (5, 2)), (Stiefel(), (3,)), (SPD(), (3,))]
)
def test_shapes_that_do_not_fit_are_refused(manifold: Any, shape: tuple[int, ...]) -> None:
    assert not manifold.check_point(torch.zeros(shape))
    for make in (manifold.random, manifold.origin):
        with pytest.raises(ValueError, match=r"tall|square|ndim|dim"):
            make(*shape)


# ---- geoopt's optimizers


@pytest.mark.parametrize(
    "case", [Case(Stiefel(r), (2, 8, 3), 0) for r in RETRACTIONS] + [Case(SPD(), (2, 4, 4), 0)], ids=str
)
@pytest.mark.parametrize("optimizer", [geoopt.optim.RiemannianAdam, geoopt.optim.RiemannianSGD])
def test_geoopts_optimizers_move_our_points(case: Case, optimizer: Any) -> None:
    target, start = draw(case, 7)[0], draw(case, 0)[0]
    if isinstance(case.manifold, SPD):
        # Not far from the identity the curvature X ⊗ X of this loss stays small enough for one learning rate.
        start = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
        target = start + linalg.symmetric(torch.randn(2, 4, 4, dtype=torch.float64)) / 4
        target = target @ target
    p = geoopt.ManifoldParameter(start, manifold=case.manifold)
    options = {"lr": 0.1} if optimizer is geoopt.optim.RiemannianAdam else {"lr": 0.02, "momentum": 0.5}
    stepper = optimizer([p], **options)

    def loss() -> Tensor:
        return (p - target).square().sum()

    first = loss().item()
    for _ in range(40):
        stepper.zero_grad()
        loss().backward()
        stepper.step()
        assert off_manifold(case.manifold, p) < 1e-10
    assert loss().item() < 0.5 * first


def test_the_same_loop_without_a_manifold_leaves_it() -> None:
    p = torch.nn.Parameter(draw(STIEFEL[0], 0)[0])
    target = draw(STIEFEL[0], 7)[0]
    stepper = geoopt.optim.RiemannianSGD([p], lr=0.05)
    (p - target).square().sum().backward()
    stepper.step()
    assert off_manifold(Stiefel(), p) > 1e-3


# ---- Stiefel


@every_stiefel
def test_projx_is_scipys_polar_factor(case: Case) -> None:
    _, _, v = draw(case, 0)
    expected = [scipy.linalg.polar(y)[0] for y in v.reshape(-1, *case.shape[-2:]).numpy()]
    close(case.manifold.projx(v).reshape(-1, *case.shape[-2:]), expected)


@pytest.mark.parametrize("shape", STIEFEL_SHAPES)
def test_expmap_is_geoopts_geodesic(shape: tuple[int, ...]) -> None:
    case = Case(Stiefel(), shape, 0)
    for seed in SEEDS:
        x, u, _ = draw(case, seed)
        close(Stiefel().expmap(x, u), geoopt.EuclideanStiefel().expmap(x, u), atol=1e-10)
        half = Stiefel().expmap(x, u / 2)
        assert (half - Stiefel().expmap(x, u)).abs().max() > 1e-3


def test_expmap_on_the_sphere_is_a_great_circle() -> None:
    x, u, _ = draw(Case(Stiefel(), (6, 1), 0), 0)
    norm = torch.linalg.vector_norm(u)
    close(Stiefel().expmap(x, u), x * norm.cos() + u / norm * norm.sin())


@pytest.mark.parametrize("shape", STIEFEL_SHAPES)
def test_polar_and_qr_retractions_are_factors_of_the_sum(shape: tuple[int, ...]) -> None:
    x, u, _ = draw(Case(Stiefel(), shape, 0), 3)
    for y, polar, qr in zip(
        (x + u).reshape(-1, *shape[-2:]).numpy(),
        Stiefel("polar").retr(x, u).reshape(-1, *shape[-2:]),
        Stiefel("qr").retr(x, u).reshape(-1, *shape[-2:]),
        strict=True,
    ):
        close(polar, scipy.linalg.polar(y)[0])
        Q, R = np.linalg.qr(y)
        close(qr, Q * np.sign(np.diag(R)))


def generator(x: Tensor, u: Tensor) -> Tensor:
    """W = P U Xᵀ - X Uᵀ P with P = I - X Xᵀ/2, (..., n, n)."""
    P = torch.eye(x.shape[-2], dtype=x.dtype) - x @ x.mT / 2
    return P @ u @ x.mT - x @ u.mT @ P


@pytest.mark.parametrize("shape", STIEFEL_SHAPES)
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_cayley_retraction_is_the_dense_formula(shape: tuple[int, ...], size: float) -> None:
    for seed in SEEDS:
        x, u, _ = draw(Case(Stiefel(), shape, 0), seed)
        eye = torch.eye(shape[-2], dtype=x.dtype)
        W = generator(x, size * u)
        close(W @ x, size * u)  # the curve starts along U
        expected = torch.linalg.solve(eye - W / 2, (eye + W / 2) @ x)
        close(Stiefel("cayley").retr(x, size * u), expected, atol=1e-11)
        close(linalg.cayley(W / 2) @ x, expected, atol=1e-11)


@pytest.mark.parametrize("shape", STIEFEL_SHAPES)
@pytest.mark.parametrize("terms", range(1, 6))
def test_cayley_neumann_is_the_dense_series_then_projected(shape: tuple[int, ...], terms: int) -> None:
    for seed in SEEDS:
        x, u, _ = draw(Case(Stiefel(), shape, 0), seed)
        u = 0.5 * u
        dense = linalg.cayley_neumann(generator(x, u) / 2, terms) @ x
        close(cayley_step(x, u, terms), dense)
        expected = [scipy.linalg.polar(y)[0] for y in dense.reshape(-1, *shape[-2:]).numpy()]
        result = Stiefel("cayley-neumann", terms=terms).retr(x, u)
        close(result.reshape(-1, *shape[-2:]), expected)
        if shape[-1] < shape[-2]:
            assert (dense - linalg.cayley_neumann(generator(x, u) / 2, terms + 1) @ x).abs().max() > 1e-6


@every_stiefel
def test_move_is_projection_then_retraction(case: Case) -> None:
    for seed in SEEDS:
        x, _, v = draw(case, seed)
        for size in (0.0, 1e-3, 1.0, 20.0):
            expected = case.manifold.retr(x, case.manifold.proju(x, size * v))
            close(case.manifold.move(x, size * v), expected, atol=1e-12 * (1 + size))


def test_move_corrects_a_defect() -> None:
    x, _, v = draw(Case(Stiefel(), (30, 4), 0), 0, torch.float32)
    off = x * (1 + 1e-4)
    assert linalg.defect(off) > 1e-5
    assert linalg.defect(Stiefel().move(off, 0.01 * v)) <= 1e-6


def test_inner_is_the_euclidean_product() -> None:
    x, u, v = draw(Case(Stiefel(), (2, 3, 6, 2), 0), 0)
    expected = np.einsum("abij,abij->ab", u.numpy(), v.numpy())
    close(Stiefel().inner(x, u, v), expected)
    close(Stiefel().inner(x, u, v, keepdim=True), expected[..., None, None])
    close(Stiefel().inner(x, u), np.einsum("abij,abij->ab", u.numpy(), u.numpy()))


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_a_vocabulary_fits(retraction: Any) -> None:
    """A 200000 x 200000 matrix in float32 would take 160 GB."""
    manifold = Stiefel(retraction)
    x = manifold.random(200_000, 4).as_subclass(Tensor)
    v = torch.randn(200_000, 4)
    u = manifold.proju(x, v)
    y = manifold.retr(x, 0.5 * u / torch.linalg.matrix_norm(u))
    assert linalg.defect(y) <= 1e-6 and (y - x).norm() > 0.3
    assert linalg.defect(manifold.move(x, v * 1e-3)) <= 1e-6
    assert off_tangent(manifold, y, manifold.transp(x, y, u)) < 1e-4 * u.norm()


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_low_precision_points_are_moved_in_float32(retraction: Any) -> None:
    manifold = Stiefel(retraction)
    x, v = manifold.random(50, 6).as_subclass(Tensor).bfloat16(), torch.randn(50, 6).bfloat16()
    y = manifold.retr(x, 0.1 * manifold.proju(x, v))
    assert y.dtype == torch.bfloat16
    # 2^-9 per entry, and column norms of 1 make that about 2^-9 √2 per column
    assert linalg.defect(y) < 2**-8
    assert linalg.defect(manifold.projx(v)) < 2**-8


def test_stiefel_options_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown retraction 'euler'; choose one of polar, qr, cayley, cayley-neumann"):
        Stiefel("euler")  # type: ignore[arg-type]
    for terms in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number >= 1, got"):
            Stiefel("cayley-neumann", terms=terms)  # type: ignore[arg-type]
    assert "cayley" in repr(Stiefel("cayley"))


def test_points_with_nan_are_refused() -> None:
    for retraction in ("polar", "qr", "cayley-neumann"):
        manifold = Stiefel(retraction)
        x, u, _ = draw(Case(manifold, (6, 2), 0), 0)
        u[0, 0] = math.nan
        with pytest.raises(ValueError, match="NaN or Inf"):
            manifold.retr(x, u)
        with pytest.raises(ValueError, match="NaN or Inf"):
            manifold.projx(u)


# ---- SPD


def each(*tensors: Tensor) -> list[tuple[np.ndarray, ...]]:
    """The matrices of several batches, side by side, as numpy arrays."""
    return list(zip(*(t.reshape(-1, *t.shape[-2:]).numpy() for t in tensors), strict=True))


def power(X: np.ndarray, exponent: float) -> np.ndarray:
    eigenvalues, V = np.linalg.eigh(X)
    return (V * eigenvalues**exponent) @ V.T


@every_spd
def test_expmap_and_logmap_are_the_textbook_formulas_and_inverse(case: Case) -> None:
    spd = case.manifold
    for seed in SEEDS:
        x, u, _ = draw(case, seed)
        y = spd.expmap(x, u)
        for X, U, Y in each(x, u, y):
            root, inverse = power(X, 0.5), power(X, -0.5)
            close(Y, root @ scipy.linalg.expm(inverse @ U @ inverse) @ root, atol=1e-11 * np.abs(Y).max())
        close(spd.logmap(x, y), u, atol=1e-9)
        z, _, _ = draw(case, seed + 50)
        close(spd.expmap(x, spd.logmap(x, z)), z, atol=1e-10)
        close(spd.logmap(x, x), 0)


@every_spd
def test_distance_is_scipys_generalised_eigenvalues(case: Case) -> None:
    spd = case.manifold
    for seed in SEEDS:
        x, u, _ = draw(case, seed)
        y, _, _ = draw(case, seed + 50)
        expected = [np.sqrt((np.log(scipy.linalg.eigh(Y, X, eigvals_only=True)) ** 2).sum()) for X, Y in each(x, y)]
        distance = spd.dist(x, y)
        assert distance.shape == case.shape[:-2]
        close(distance.reshape(-1), expected, atol=1e-11)
        close(distance, spd.dist(y, x), atol=1e-11)
        close(spd.dist(x, x), 0)
        assert spd.dist(x, y, keepdim=True).shape == (*case.shape[:-2], 1, 1)
        # The length of a geodesic, and invariance under X -> M X Mᵀ for any invertible M.
        close(spd.dist(x, spd.expmap(x, u)), spd.inner(x, u).sqrt(), atol=1e-10)
        M = torch.randn(case.shape[-1], case.shape[-1], dtype=torch.float64) + 3 * torch.eye(case.shape[-1])
        close(spd.dist(M @ x @ M.T, M @ y @ M.T), distance, atol=1e-9)


@every_spd
def test_inner_is_the_trace(case: Case) -> None:
    x, u, _ = draw(case, 0)
    _, v, _ = draw(case, 1)
    expected = [np.trace(np.linalg.solve(X, U) @ np.linalg.solve(X, V)) for X, U, V in each(x, u, v)]
    close(case.manifold.inner(x, u, v).reshape(-1), expected, atol=1e-10)
    close(case.manifold.inner(x, u), case.manifold.inner(x, u, u), atol=1e-10)
    assert case.manifold.inner(x, u, v, keepdim=True).shape == (*case.shape[:-2], 1, 1)


@every_spd
def test_transport_is_an_isometry(case: Case) -> None:
    spd = case.manifold
    for seed in SEEDS:
        x, u, _ = draw(case, seed)
        y, v, _ = draw(case, seed + 50)
        moved_u, moved_v = spd.transp(x, y, u), spd.transp(x, y, v)
        close(spd.inner(y, moved_u, moved_v), spd.inner(x, u, v), atol=1e-9)
        close(spd.transp(y, x, moved_u), u, atol=1e-10)
        assert (spd.inner(y, u) - spd.inner(x, u)).abs().max() > 1e-3  # leaving the vector as it is would not do


@every_spd
def test_retraction_is_the_second_order_expansion(case: Case) -> None:
    x, u, _ = draw(case, 0)
    expected = [X + U + U @ np.linalg.solve(X, U) / 2 for X, U in each(x, u)]
    close(case.manifold.retr(x, u).reshape(-1, *case.shape[-2:]), expected, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nearest_spd_clips_eigenvalues(dtype: torch.dtype) -> None:
    X = torch.randn(2, 5, 5).to(dtype)
    S = nearest_spd(X)
    assert S.dtype == dtype and torch.equal(S, S.mT)
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    for before, after in each(X.double(), S.double()):
        eigenvalues, V = np.linalg.eigh((before + before.T) / 2)
        assert eigenvalues[0] < 0
        expected = (V * np.maximum(eigenvalues, floor * eigenvalues[-1])) @ V.T
        close(after, expected, atol=4 * torch.finfo(dtype).eps * eigenvalues[-1])


def test_nearest_spd_refuses_what_has_none_near() -> None:
    for hopeless in (-torch.eye(3), torch.zeros(3, 3), torch.stack([torch.eye(3), -torch.eye(3)])):
        with pytest.raises(ValueError, match="positive eigenvalue"):
            nearest_spd(hopeless)
    with pytest.raises(ValueError, match="NaN or Inf"):
        SPD().projx(torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match="real floating dtype"):
        nearest_spd(torch.eye(2).int())


@pytest.mark.parametrize("retraction", ["polar", "qr", "cayley", "cayley-neumann"])
def test_retractions_and_geodesics_have_a_gradient_and_broadcast(retraction: Any) -> None:
    torch.manual_seed(0)
    manifold = Stiefel(retraction)
    x = manifold.projx(torch.randn(5, 3, dtype=torch.float64))
    u = 0.1 * torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    for move in (manifold.retr, manifold.expmap):
        assert torch.autograd.gradcheck(lambda u, move=move: move(x, manifold.proju(x, u)), u)
        for i in range(2):
            one = manifold.proju(x, u[i].detach())
            torch.testing.assert_close(move(x, manifold.proju(x, u.detach()))[i], move(x, one))


def test_no_points_at_all() -> None:
    none = torch.zeros(0, 5, 3)
    assert Stiefel().check_vector_on_tangent(none, none)
    assert SPD().check_point_on_manifold(torch.zeros(0, 3, 3))
