"""Each formula of a manifold against an independent one; what every manifold must keep is in test_contracts.py."""

import math
from typing import Any, get_args

import geoopt
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifold_tying import SPD, Stiefel, linalg
from manifold_tying.manifolds import Retraction, nearest_spd
from manifold_tying.testing import assert_tangent, points, tangent_vectors

RETRACTIONS = get_args(Retraction)
SHAPES = st.sampled_from([(7, 3), (4, 4), (6, 1), (2, 3, 6, 2)])
SQUARES = st.sampled_from([(4, 4), (1, 1), (2, 3, 3, 3)])
every_retraction = pytest.mark.parametrize("retraction", RETRACTIONS)
FLOAT32 = torch.float32


def vector(
    draw: Any, manifold: Any, shapes: Any, size: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A point and a tangent vector of that length."""
    x = draw(points(manifold, draw(shapes), dtype=dtype))
    u = draw(tangent_vectors(manifold, x))
    return x, size * u


def matrices(*tensors: Tensor) -> list[tuple[np.ndarray, ...]]:
    """The matrices of several batches, side by side, as numpy arrays."""
    return list(zip(*(t.reshape(-1, *t.shape[-2:]).numpy() for t in tensors), strict=True))


def close(actual: Any, expected: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


# ---- Stiefel


@every_retraction
@given(st.data(), st.sampled_from([1e-3, 2.0, 1e4]))
def test_retraction_in_float32_keeps_the_promised_defect(retraction: Any, data: st.DataObject, size: float) -> None:
    x, u = vector(data.draw, Stiefel(retraction), SHAPES, size, FLOAT32)
    assert linalg.defect(Stiefel(retraction).retr(x, u)).max() <= 1e-6
    # and corrects the defect that a point has
    moved = Stiefel(retraction).retr(x.double() * 1.01, 0.1 * u.double() / size)
    assert linalg.defect(moved).max() <= 1e-12


@every_retraction
def test_long_vectors_with_equal_columns_are_retracted_in_float32(retraction: Any) -> None:
    """UᵀU has one large eigenvalue, next to which float32 does not see the identity."""
    for seed in range(20):
        torch.manual_seed(seed)
        x = Stiefel(retraction).random(48, 8)
        u = Stiefel(retraction).proju(x, 1e4 * torch.randn(48, 1).expand(48, 8))
        assert linalg.defect(Stiefel(retraction).retr(x, u)) <= 1e-6


@pytest.mark.parametrize(
    ("manifold", "shape"), [(Stiefel(), (2, 5)), (SPD(), (5, 2)), (Stiefel(), (3,)), (SPD(), (3,))]
)
def test_shapes_that_do_not_fit_are_refused(manifold: Any, shape: tuple[int, ...]) -> None:
    assert not manifold.check_point(torch.zeros(shape))
    for make in (manifold.random, manifold.origin):
        with pytest.raises(ValueError, match=r"tall|square|ndim|dim"):
            make(*shape)


@pytest.mark.parametrize(
    ("manifold", "shape", "dtype"), [(Stiefel(), (2, 7, 3), torch.float32), (SPD(), (2, 4, 4), torch.float64)]
)
def test_random_and_origin_are_geoopts_tensors(manifold: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for made in (manifold.random(*shape, dtype=dtype), manifold.origin(*shape, dtype=dtype)):
        assert isinstance(made, geoopt.ManifoldTensor) and made.manifold is manifold
        assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    close(made, np.broadcast_to(np.eye(shape[-2], shape[-1]), shape), atol=0)
    assert manifold.random(shape).shape == shape  # as one tuple, too


@given(st.data())
def test_expmap_is_geoopts_geodesic_and_on_the_sphere_a_great_circle(data: st.DataObject) -> None:
    x, u = vector(data.draw, Stiefel(), SHAPES)
    close(Stiefel().expmap(x, u), geoopt.EuclideanStiefel().expmap(x, u), atol=1e-10)
    x, u = vector(data.draw, Stiefel(), st.just((6, 1)))
    norm = torch.linalg.vector_norm(u)
    close(Stiefel().expmap(x, u), x * norm.cos() + u * torch.sinc(norm / math.pi))


@given(st.data())
def test_polar_and_qr_retractions_are_factors_of_the_sum(data: st.DataObject) -> None:
    x, u = vector(data.draw, Stiefel(), SHAPES)
    for Y, polar, qr in matrices(x + u, Stiefel("polar").retr(x, u), Stiefel("qr").retr(x, u)):
        close(polar, scipy.linalg.polar(Y)[0])
        Q, R = np.linalg.qr(Y)
        close(qr, Q * np.sign(np.diag(R)))


def generator(x: Tensor, u: Tensor) -> Tensor:
    """W = P U Xᵀ - X Uᵀ P with P = I - X Xᵀ/2, (..., n, n)."""
    P = torch.eye(x.shape[-2], dtype=x.dtype) - x @ x.mT / 2
    return P @ u @ x.mT - x @ u.mT @ P


@given(st.data(), st.sampled_from([0.1, 1.0, 10.0]))
def test_cayley_retraction_is_the_dense_formula(data: st.DataObject, size: float) -> None:
    x, u = vector(data.draw, Stiefel("cayley"), SHAPES, size)
    eye, W = torch.eye(x.shape[-2], dtype=x.dtype), generator(x, u)
    close(W @ x, u)  # the curve starts along U
    expected = torch.linalg.solve(eye - W / 2, (eye + W / 2) @ x)
    close(Stiefel("cayley").retr(x, u), expected, atol=1e-11)
    close(linalg.cayley(W / 2) @ x, expected, atol=1e-11)


@pytest.mark.parametrize("terms", [1, 2, 5])
@given(st.data())
def test_cayley_neumann_is_the_dense_series_then_projected(terms: int, data: st.DataObject) -> None:
    manifold = Stiefel("cayley-neumann", terms=terms)
    x, u = vector(data.draw, manifold, SHAPES, 0.5)
    dense = linalg.cayley_neumann(generator(x, u) / 2, terms) @ x
    for Y, moved in matrices(dense, manifold.retr(x, u)):
        close(moved, scipy.linalg.polar(Y)[0])


@every_retraction
def test_a_vocabulary_fits(retraction: Any) -> None:
    """A 200000 x 200000 matrix in float32 would take 160 GB."""
    manifold = Stiefel(retraction)
    x = manifold.random(200_000, 4).as_subclass(Tensor)
    v = torch.randn(200_000, 4)
    u = manifold.proju(x, v)
    y = manifold.retr(x, 0.5 * u / torch.linalg.matrix_norm(u))
    assert linalg.defect(y) <= 1e-6 and (y - x).norm() > 0.3
    assert linalg.defect(manifold.move(x, v * 1e-3)) <= 1e-6
    assert_tangent(manifold, y, manifold.transp(x, y, u))


@every_retraction
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
        with pytest.raises(ValueError, match="integer >= 1, got"):
            Stiefel("cayley-neumann", terms=terms)  # type: ignore[arg-type]
    assert "cayley" in repr(Stiefel("cayley"))


@pytest.mark.parametrize("retraction", ["polar", "qr", "cayley-neumann"])
def test_points_with_nan_are_refused(retraction: Any) -> None:
    manifold = Stiefel(retraction)
    x = manifold.random(6, 2).as_subclass(Tensor)
    for refuse in (lambda u: manifold.retr(x, u), manifold.projx):
        with pytest.raises(ValueError, match="NaN or Inf"):
            refuse(x * math.nan)


@every_retraction
def test_retractions_and_geodesics_broadcast_and_geodesics_have_a_gradient(retraction: Any) -> None:
    manifold = Stiefel(retraction)
    x, u = manifold.projx(torch.randn(4, 2).double()), 0.1 * torch.randn(2, 4, 2).double()
    for move in (manifold.retr, manifold.expmap):
        for one, moved in zip(u, move(x, manifold.proju(x, u)), strict=True):
            torch.testing.assert_close(moved, move(x, manifold.proju(x, one)))
    if retraction == "polar":  # of retractions the contract holds it
        assert torch.autograd.gradcheck(lambda u: manifold.expmap(x, manifold.proju(x, u)), u.requires_grad_())


# ---- SPD


def power(X: np.ndarray, exponent: float) -> np.ndarray:
    eigenvalues, V = np.linalg.eigh(X)
    return (V * eigenvalues**exponent) @ V.T


@given(st.data())
def test_expmap_and_logmap_are_the_textbook_formulas_and_inverse(data: st.DataObject) -> None:
    spd = SPD()
    x, u = vector(data.draw, spd, SQUARES)
    y = spd.expmap(x, u)
    for X, U, Y in matrices(x, u, y):
        root, inverse = power(X, 0.5), power(X, -0.5)
        close(Y, root @ scipy.linalg.expm(inverse @ U @ inverse) @ root, atol=1e-11 * np.abs(Y).max())
    close(spd.logmap(x, y), u, atol=1e-9)
    z = data.draw(points(spd, tuple(x.shape)))
    close(spd.expmap(x, spd.logmap(x, z)), z, atol=1e-10)
    close(spd.logmap(x, x), 0)


@given(st.data())
def test_distance_is_scipys_generalised_eigenvalues(data: st.DataObject) -> None:
    spd = SPD()
    x, u = vector(data.draw, spd, SQUARES)
    y = data.draw(points(spd, tuple(x.shape)))
    expected = [np.sqrt((np.log(scipy.linalg.eigh(Y, X, eigvals_only=True)) ** 2).sum()) for X, Y in matrices(x, y)]
    distance = spd.dist(x, y)
    assert distance.shape == x.shape[:-2] and spd.dist(x, y, keepdim=True).shape == (*x.shape[:-2], 1, 1)
    close(distance.reshape(-1), expected, atol=1e-11)
    close(distance, spd.dist(y, x), atol=1e-11)
    close(spd.dist(x, x), 0)
    # The length of a geodesic, and invariance under X -> M X Mᵀ for any invertible M.
    close(spd.dist(x, spd.expmap(x, u)), spd.inner(x, u).sqrt(), atol=1e-10)
    M = torch.randn(x.shape[-2:], dtype=torch.float64) + 3 * torch.eye(x.shape[-1])
    close(spd.dist(M @ x @ M.T, M @ y @ M.T), distance, atol=1e-9)


@pytest.mark.parametrize("eigenvalues", [(1.0, 2.0, 5.0), (1.0, 3.0, 3.0), (2.0, 2.0, 2.0)])
def test_derivatives_of_logmap_match_finite_differences_at_repeated_eigenvalues(eigenvalues: tuple[float, ...]) -> None:
    spd, x = SPD(), 2 * torch.eye(3).double()
    rotation = torch.linalg.qr(torch.randn(3, 3).double())[0]
    y = rotation @ torch.diag(torch.tensor(eigenvalues).double()) @ rotation.T

    def log(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return spd.logmap((a + a.mT) / 2, (b + b.mT) / 2)

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return spd.dist((a + a.mT) / 2, (b + b.mT) / 2)

    leaves = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(log, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(log, leaves)
    if eigenvalues[0] != 2:
        assert torch.autograd.gradcheck(distance, leaves)
        assert torch.autograd.gradgradcheck(distance, leaves)

    def cubes(b: torch.Tensor) -> torch.Tensor:
        return (log(x.detach(), b) ** 3).sum()

    expected = torch.autograd.functional.hessian(cubes, y.detach())
    torch.testing.assert_close(torch.func.hessian(cubes)(y.detach()), expected)


def test_lengths_have_the_gradient_zero_at_zero() -> None:
    spd, x = SPD(), torch.eye(3).double()
    u, y = torch.zeros(3, 3).double().requires_grad_(), x.clone().requires_grad_()
    for length, leaf in ((spd.norm(x, u), u), (spd.dist(x, y), y), (Stiefel().norm(x, u), u)):
        assert length.ndim == 0 and torch.equal(torch.autograd.grad(length, leaf)[0], torch.zeros_like(x))
    assert spd.norm(x, 2 * x, keepdim=True).tolist() == [[pytest.approx(2 * 3**0.5)]]


@given(st.data())
def test_inner_is_the_trace_and_transport_its_isometry(data: st.DataObject) -> None:
    spd = SPD()
    x, u = vector(data.draw, spd, SQUARES)
    y, v = data.draw(points(spd, tuple(x.shape))), data.draw(tangent_vectors(spd, x))
    expected = [np.trace(np.linalg.solve(X, U) @ np.linalg.solve(X, V)) for X, U, V in matrices(x, u, v)]
    close(spd.inner(x, u, v).reshape(-1), expected, atol=1e-10)
    assert spd.inner(x, u, v, keepdim=True).shape == (*x.shape[:-2], 1, 1)
    close(spd.inner(y, spd.transp(x, y, u), spd.transp(x, y, v)), spd.inner(x, u, v), atol=1e-9)
    close(spd.transp(y, x, spd.transp(x, y, u)), u, atol=1e-10)


@given(st.data())
def test_retraction_is_the_second_order_expansion(data: st.DataObject) -> None:
    x, u = vector(data.draw, SPD(), SQUARES)
    for X, U, Y in matrices(x, u, SPD().retr(x, u)):
        close(Y, X + U + U @ np.linalg.solve(X, U) / 2, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nearest_spd_clips_eigenvalues(dtype: torch.dtype) -> None:
    X = torch.randn(2, 5, 5).to(dtype)
    S = nearest_spd(X)
    assert S.dtype == dtype and torch.equal(S, S.mT)
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    for before, after in matrices(X.double(), S.double()):
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


def test_no_points_at_all() -> None:
    none = torch.zeros(0, 5, 3)
    assert Stiefel().check_vector_on_tangent(none, none)
    assert SPD().check_point_on_manifold(torch.zeros(0, 3, 3))
