"""Our manifolds, constraints, optimizers and interfaces under the contracts that users run on theirs; and some of geoopt's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import geoopt
import pytest
import torch
from constraint_machine import ConstraintMachine
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from layers import ORTHONORMAL
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from manifold_tying import (
    PIT,
    SPD,
    Sphere,
    Stiefel,
    TransposeTying,
    Untied,
    constrain,
    doubly_stochastic,
    equivalence,
    low_rank,
    orthogonal,
    spd,
    sphere,
    stiefel,
)
from manifold_tying import testing as mtt
from manifold_tying.optim import RiemannianAdam, RiemannianMuon, RiemannianSGD

# ---- manifolds


@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (2, 2), (4, 1)])
def test_stiefel(shape: tuple[int, int]) -> None:
    mtt.check_manifold(Stiefel(), shape, order=2, uniform=True)


@pytest.mark.parametrize("manifold", [Stiefel("qr"), Stiefel("cayley"), Stiefel("cayley-neumann", terms=3)], ids=repr)
@pytest.mark.parametrize("shape", [(5, 2), (3, 3)])
def test_other_retractions(manifold: Stiefel, shape: tuple[int, int]) -> None:
    of_the_retraction = ("retr", "a batch", "dtype")
    others = [law.name for law in mtt.MANIFOLD_LAWS if not law.name.startswith(of_the_retraction)]
    mtt.check_manifold(manifold, shape, skip=others)


@pytest.mark.parametrize("d", [1, 3])
def test_spd(d: int) -> None:
    mtt.check_manifold(SPD(), (d, d), order=2)


RADII: dict[Any, Any] = {
    "rows": torch.tensor([[0.5], [1.0], [2.0], [3.0]]),
    "columns": torch.tensor([0.5, 1.0, 2.0]),
    "matrix": 2.5,
}


@pytest.mark.parametrize("manifold", [Sphere("rows"), *(Sphere(of, radius) for of, radius in RADII.items())], ids=str)
def test_spheres(manifold: Sphere) -> None:
    mtt.check_manifold(manifold, (4, 3), order=2, uniform=manifold.of != "rows")


class ForgettingRadius(Sphere):
    """Its points have the norm 1, whatever the radius."""

    def projx(self, x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def test_a_sphere_that_forgets_its_radius_is_caught(without_shrinking: None) -> None:
    with pytest.raises(mtt.BrokenLaws, match="projx lands on the manifold"):
        mtt.check_manifold(ForgettingRadius(radius=2.0), (4, 3))
    with pytest.raises(ValueError, match="check_manifold tests it"):
        constrain(nn.Linear(3, 4), "weight", ForgettingRadius(radius=2.0))


# Of geoopt 0.5.1: a shape, and the laws that it breaks.
GEOOPT: dict[str, tuple[Any, tuple[int, ...], list[str]]] = {
    "Sphere": (geoopt.Sphere(), (5,), []),
    "EuclideanStiefel": (geoopt.EuclideanStiefel(), (5, 2), ["retr has a gradient"]),
    "Stiefel": (
        geoopt.Stiefel(),
        (5, 2),
        [  # its proju is the gradient of the canonical metric, and retr and expmap project by it first
            "expmap moves along the vector",
            "proju and egrad2rgrad give tangent vectors",
            "proju is orthogonal",
            "proju keeps all tangent vectors",
            "retr moves along the vector",
        ],
    ),
    "SymmetricPositiveDefinite": (geoopt.SymmetricPositiveDefinite(), (3, 3), []),
    "PoincareBall": (
        geoopt.PoincareBall().double(),
        (4,),
        [  # without keepdim inner broadcasts one point's metric to all the others; one ball has one dtype
            "a batch equals its elements",
            "dtype and device are preserved",
            "egrad2rgrad is the gradient for the metric",
            "inner is a metric",
            "proju is orthogonal",
        ],
    ),
}


@pytest.mark.parametrize("name", GEOOPT)
def test_geoopts_manifolds(name: str) -> None:
    manifold, shape, broken = GEOOPT[name]
    mtt.check_manifold(manifold, shape, skip=broken)


def test_a_batch_is_no_shape_of_a_point() -> None:
    with pytest.raises(ValueError, match="ndim 1, so that is a batch"):
        mtt.check_manifold(geoopt.Sphere(), (4, 5))


# ---- optimizers


class FixedNorm(geoopt.Manifold):
    """A user's own manifold: matrices of the Frobenius norm 2."""

    name, ndim, reversible = "FixedNorm", 2, False

    def projx(self, x: Tensor) -> Tensor:
        return 2 * x / x.norm(dim=(-2, -1), keepdim=True)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u - x * self.inner(x, x, u, keepdim=True) / 4

    egrad2rgrad = proju

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        angle = u.norm(dim=(-2, -1), keepdim=True) / 2
        return x * angle.cos() + u * torch.sinc(angle / torch.pi)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return self.proju(y, v)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        return (u * (u if v is None else v)).sum((-2, -1), keepdim=keepdim)

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str]:
        return bool(((x.norm(dim=(-2, -1)) - 2).abs() < atol).all()), "the norm is not 2"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str]:
        return bool((self.inner(x, x, u).abs() < atol).all()), "the vector is not tangent"


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: RiemannianAdam(params, lr=0.05),
    "Adam by row": lambda params: RiemannianAdam(params, lr=0.05, second_moment="row"),
    "SGD": lambda params: RiemannianSGD(params, lr=0.05),
    "SGD, momentum": lambda params: RiemannianSGD(params, lr=0.05, momentum=0.5, nesterov=True),
    "Muon": lambda params: RiemannianMuon(params, lr=0.02),
    "Muon, tangent": lambda params: RiemannianMuon(params, lr=0.02, dual_steps=2, nesterov=False),
    "slow SGD": lambda params: RiemannianSGD(params, lr=1e-3, momentum=0.5),
}
POINTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "polar": (Stiefel("polar"), (6, 2)),
    "qr": (Stiefel("qr"), (4, 4)),
    "cayley": (Stiefel("cayley"), (6, 2)),
    "cayley-neumann": (Stiefel("cayley-neumann"), (6, 2)),
    "SPD": (SPD(), (3, 3)),
    "a user's": (FixedNorm(), (3, 4)),
    "rows": (Sphere(radius=RADII["rows"]), (4, 3)),
    **{name: (manifold, shape) for name, (manifold, shape, _) in GEOOPT.items()},
}
CASES = [
    # of geoopt one manifold of each kind of point: to our optimizers its two Stiefel manifolds are strangers like these
    *(("Adam", points) for points in POINTS if points not in ("EuclideanStiefel", "Stiefel")),
    *(("Adam by row", "polar"), ("SGD", "Sphere"), ("SGD, momentum", "polar"), ("slow SGD", "SPD")),
    ("SGD, momentum", "rows"),
    *(("Muon", "qr"), ("Muon", "rows"), ("Muon", "a user's"), ("Muon, tangent", "polar")),
]


@pytest.mark.parametrize(("name", "points"), CASES)
def test_optimizers(name: str, points: str) -> None:
    converging = ("Adam", "polar"), ("Adam", "Sphere"), ("SGD, momentum", "polar")  # the dearest law: not for each case
    skip = [] if (name, points) in converging else ["it converges to a known optimum"]
    if points == "SPD":
        skip += ["huge gradients leave points on the manifold"]  # x g x, its square and its exponential overflow
    mtt.check_optimizer(OPTIMIZERS[name], *POINTS[points], skip=skip)


def test_geoopts_optimizers_move_our_points() -> None:
    mtt.check_optimizer(
        lambda params: geoopt.optim.RiemannianAdam(params, lr=0.05),
        Stiefel(),
        skip=["maximize mirrors minimize", "a saved state resumes bit for bit", "deep copies resume bit for bit"],
    )


# ---- parametrizations


def flat(weight: Tensor) -> None:
    mtt.assert_orthonormal(weight.flatten(1))


LAYERS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Tensor], None]]] = {
    "tall": (lambda: nn.Linear(3, 5), "weight", mtt.assert_orthonormal),
    "wide": (lambda: nn.Linear(5, 3), "weight", mtt.assert_orthonormal),
    "square": (lambda: nn.Linear(4, 4), "weight", mtt.assert_orthonormal),
    "convolution": (lambda: nn.Conv2d(2, 3, 2), "weight", flat),
    "transposed": (lambda: nn.ConvTranspose1d(1, 6, 2), "weight", flat),
}


# How a weight becomes tall matrices is the same for all constraints; a Cayley map takes another way where they are square.
@pytest.mark.parametrize(
    ("constraint", "layer"),
    [
        *(("stiefel", layer) for layer in ("tall", "wide", "convolution", "transposed")),
        *(("stiefel, cayley", "square"), ("polar", "wide"), ("qr", "tall")),
        *((constraint, layer) for constraint in ("cayley", "cayley-neumann") for layer in ("tall", "square")),
    ],
)
def test_orthonormal_weights(constraint: str, layer: str) -> None:
    make, name, holds = LAYERS[layer]
    mtt.check_parametrization(lambda module: ORTHONORMAL[constraint](module, name), make(), name, holds=holds)


@pytest.mark.parametrize("map", ["polar", "cayley"])
def test_rotations(map: Any) -> None:
    def holds(weight: Tensor) -> None:
        mtt.assert_orthonormal(weight)
        assert torch.linalg.det(weight) > 0

    mtt.check_parametrization(lambda layer: orthogonal(layer, map=map, special=True), nn.Linear(3, 3), holds=holds)


@pytest.mark.parametrize("of", RADII)
def test_weights_of_given_norms(of: Any) -> None:
    def holds(weight: Tensor) -> None:
        mtt.assert_on_manifold(Sphere(of, RADII[of]), weight)

    mtt.check_parametrization(lambda layer: sphere(layer, of=of, radius=RADII[of]), nn.Linear(3, 4), holds=holds)


def test_weights_that_keep_their_norms() -> None:
    mtt.check_parametrization(sphere, nn.Conv2d(2, 3, 2))


@pytest.mark.parametrize("diagonal", ["softplus", "exp"])
def test_spd_weights(diagonal: Any) -> None:
    mtt.check_parametrization(
        lambda layer: spd(layer, "weight", diagonal=diagonal), nn.Linear(4, 4), holds=mtt.assert_spd
    )


@pytest.mark.parametrize("spectrum", ["free", "fixed", "equal"])
def test_weights_of_low_rank(spectrum: Any) -> None:
    def holds(weight: Tensor) -> None:
        values = torch.linalg.svdvals(weight.double())
        assert values[2:].max() <= 1e-6 * values[0]
        if spectrum == "equal":
            torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0)

    mtt.check_parametrization(lambda layer: low_rank(layer, rank=2, spectrum=spectrum), nn.Linear(4, 5), holds=holds)


@pytest.mark.parametrize("map", ["sinkhorn", "orthostochastic"])
def test_doubly_stochastic_weights(map: Any) -> None:
    def holds(weight: Tensor) -> None:
        assert weight.min() >= 0
        for dim in (0, 1):
            sums = weight.sum(dim)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6 if map == "sinkhorn" else 1e-5)

    refused = ["assigning the current weight changes nothing"] if map == "orthostochastic" else []
    mtt.check_parametrization(
        lambda layer: doubly_stochastic(layer, map=map), nn.Linear(4, 4), holds=holds, skip=refused
    )


@pytest.mark.parametrize("scheme", ["block", "full"])
def test_equivalence(scheme: Any) -> None:
    mtt.check_parametrization(lambda layer: equivalence(layer, scheme=scheme, block_size=2), nn.Linear(4, 6))


class Leaving(FixedNorm):
    """Its retraction leaves the manifold, little by little."""

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u


CONSTRAINED: dict[str, tuple[Callable[[], geoopt.Manifold], tuple[int, int]]] = {
    "geoopt's Sphere": (geoopt.Sphere, (3, 4)),
    "geoopt's SPD": (geoopt.SymmetricPositiveDefinite, (4, 4)),
    "PoincareBall": (geoopt.PoincareBall, (3, 4)),
    "Lorentz": (geoopt.Lorentz, (3, 4)),
    "SPD": (SPD, (4, 4)),
    "a user's": (FixedNorm, (3, 4)),
}


def check_constrained(make: Callable[[], geoopt.Manifold], shape: tuple[int, int]) -> None:
    mtt.check_parametrization(
        lambda layer: constrain(layer, "weight", make()),
        nn.Linear(shape[1], shape[0]),
        holds=lambda weight: make().to(weight.dtype).assert_check_point_on_manifold(weight, atol=1e-4, rtol=1e-4),
    )


@pytest.mark.parametrize("name", CONSTRAINED)
def test_weights_on_any_manifold(name: str) -> None:
    check_constrained(*CONSTRAINED[name])


def test_the_users_manifold_keeps_the_laws_and_its_broken_twin_is_caught(without_shrinking: None) -> None:
    mtt.check_manifold(FixedNorm(), (3, 4), order=2)
    with pytest.raises(mtt.BrokenLaws) as caught:
        check_constrained(Leaving, (3, 4))
    assert "the constraint holds, at once and after training" in caught.value.broken


class OnManifold(nn.Module):
    """A user's own parametrization, which stores a point and says on what manifold it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.manifold = geoopt.EuclideanStiefel()

    def forward(self, point: Tensor) -> Tensor:
        return point

    def right_inverse(self, weight: Tensor) -> Tensor:
        return self.manifold.projx(weight)


def with_own_parametrization(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", OnManifold())
    return layer


def with_geoopts_parameter(layer: Any) -> nn.Module:
    with_own_parametrization(layer)
    parts = layer.parametrizations.weight
    parts.original = geoopt.ManifoldParameter(parts.original.detach(), manifold=parts[0].manifold)
    return layer


@pytest.mark.parametrize("put_on", [with_own_parametrization, with_geoopts_parameter])
def test_points_of_others_are_trained_on_their_manifold(put_on: Any) -> None:
    mtt.check_parametrization(put_on, nn.Linear(3, 5), holds=mtt.assert_orthonormal, skip=[SHARED_CLASS])


# Broken laws of torch 2.13. A deep copy shares the class from which remove_parametrizations deletes the weight. Householder
# vectors store signs on the diagonal and truncate them to integers, so any change of the diagonal changes the weight.
# What it stores in a tied weight's place is neither the old weight nor the new one. The rounding of an exponential grows with
# the stored tensor, and not every tensor holds Householder vectors.
SHARED_CLASS, TIED = "deep copies are equal and independent", "a tied weight is kept or refused"
FAR = "the constraint holds far from the start"
TORCH = {
    "matrix_exp": [SHARED_CLASS, TIED, FAR],
    "cayley": [SHARED_CLASS, TIED],
    "householder": [SHARED_CLASS, TIED, FAR, "gradients match finite differences"],
}


@pytest.mark.parametrize("kind", TORCH)
def test_torchs_own_break_these_and_no_other_laws(kind: str, without_shrinking: None) -> None:
    with pytest.raises(mtt.BrokenLaws) as caught:
        mtt.check_parametrization(
            lambda layer: parametrizations.orthogonal(layer, orthogonal_map=kind),
            nn.Linear(3, 5),
            holds=mtt.assert_orthonormal,
        )
    assert {SHARED_CLASS, TIED} <= set(caught.value.broken) <= set(TORCH[kind])


class Symmetric(nn.Module):
    """A parametrization without right_inverse: its weight cannot be assigned."""

    def forward(self, X: Tensor) -> Tensor:
        return X.triu() + X.triu(1).mT


@pytest.mark.parametrize(
    ("put_on", "skipped"),
    [
        (lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()), [SHARED_CLASS]),
        (parametrizations.weight_norm, [SHARED_CLASS, TIED]),
    ],
)
def test_parametrizations_of_users(put_on: Any, skipped: list[str]) -> None:
    mtt.check_parametrization(put_on, nn.Linear(4, 4), skip=skipped)


# ---- token interfaces

INTERFACES: dict[str, tuple[Callable[[], Any], bool]] = {
    "untied": (lambda: Untied(7, 3), False),
    "untied, one column": (lambda: Untied(5, 1), False),
    "untied, scaled": (lambda: Untied(7, 3, logit_scale=True), False),
    "transpose": (lambda: TransposeTying(7, 3), False),
    "PIT, frozen": (lambda: PIT(7, 3, memory="frozen"), True),
    "PIT, exp": (lambda: PIT(7, 3, memory="trainable", diagonal="exp", retraction="cayley"), True),
    "PIT, free": (lambda: PIT(7, 3, std=0.3), True),
    "PIT from a table": (lambda: PIT.from_embedding(torch.randn(7, 3), transform="head"), True),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_interfaces(name: str) -> None:
    make, consistent = INTERFACES[name]
    mtt.check_token_interface(make, consistent=consistent)


# ---- anything, in any order

TestConstraints = ConstraintMachine.TestCase


class Spoiled(ConstraintMachine):
    """Writes to a stored tensor behind the optimizer's back."""

    def make_model(self, data: st.DataObject) -> nn.Module:
        return nn.ModuleList([stiefel(nn.Linear(3, 5))])

    @rule()
    def spoil(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1.5)


def test_the_machine_sees_a_point_that_left(without_shrinking: None) -> None:
    with pytest.raises(AssertionError, match="the defect"):
        run_state_machine_as_test(Spoiled, settings=settings.default)


def test_the_machine_trains_for_long_within_float32() -> None:
    """At ten times its rate T⁻¹ overflowed, and W_out E was NaN."""
    machine = ConstraintMachine()
    machine.model, machine.momentum = PIT(11, 4, memory="frozen", diagonal="softplus"), True
    machine._new_optimizer()
    for seed in range(3, 87, 7):
        machine.train(seed=seed, steps=3, size=10.0)
        machine.constraints_hold()


# ---- strategies and assertions


@given(mtt.token_ids(7))
def test_ids_are_those_of_a_vocabulary(ids: Tensor) -> None:
    assert ids.dtype == torch.int64 and ids.ndim <= 2 and bool(((ids >= 0) & (ids < 7)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_assertions_accept_rounding_and_refuse_a_thousand_times_that(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    X = torch.linalg.qr(torch.randn(200, 30, dtype=torch.float64))[0].to(dtype)
    eps = 1e3 * mtt.rounding(dtype, 200)
    T = torch.eye(30, dtype=dtype)
    bent = T.clone()
    bent[0, 1] += eps
    # each: an assertion, what it accepts, and what it refuses
    cases: list[tuple[Callable[..., None], tuple[Tensor, ...], tuple[Tensor, ...]]] = [
        (mtt.assert_orthonormal, (X,), (X * (1 + eps),)),
        (mtt.assert_orthonormal, (X.mT,), (X.mT * torch.nan,)),
        (mtt.assert_spd, (T,), (bent,)),
        (mtt.assert_spd, (T,), (-T,)),
        (mtt.assert_interface_consistent, (X, X.mT), (X, X.mT * (1 + eps))),
        (mtt.assert_same_spectrum, (X, X.flip(0, 1)), (X, (1 + eps) * X)),
        (partial(mtt.assert_on_manifold, Stiefel()), (X,), (X * 1.1,)),
        (partial(mtt.assert_tangent, Stiefel()), (X, X * 0), (X, X)),
    ]
    for check, good, bad in cases:
        check(*good)
        with pytest.raises(AssertionError):
            check(*bad)


def test_a_broken_law_is_reported_with_its_smallest_example() -> None:
    law = "random points are on the manifold"
    outside = type("Outside", (Stiefel,), {"random": lambda self, *shape, **options: torch.randn(shape, **options)})()
    with pytest.raises(mtt.BrokenLaws) as caught:
        mtt.check_manifold(outside, (3, 1), skip={law.name for law in mtt.MANIFOLD_LAWS} - {law})
    assert list(caught.value.broken) == [law]
    assert "example: batch shape: ()" in str(caught.value)  # no batch is the simplest of all


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="expected laws of this contract in skip=, got no such law"):
        mtt.check_manifold(Stiefel(), (3, 1), skip=["no such law"])
    with pytest.raises(ValueError, match="the shape of a point"):
        mtt.check_manifold(Stiefel(), (1, 3))
    with pytest.raises(ValueError, match="accepts none of the default shapes"):
        mtt.check_optimizer(OPTIMIZERS["Adam"], type("Stacks", (Stiefel,), {"ndim": 3})())
    with pytest.raises(ValueError, match="expected put_on to register"):
        mtt.check_parametrization(lambda layer: layer, nn.Linear(2, 2))
