"""Factors and maps at the limits: ill-conditioned, under autocast, and in unusual memory layouts."""

import importlib
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from matrices import conditioned
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.manifolds import SPD, Retraction, Stiefel

mpmath: Any = importlib.import_module("mpmath")  # torch's dependency, through sympy; it has no type stubs


def exact_polar(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a small float64 matrix, by an SVD with 40 digits."""
    with mpmath.workdps(40):
        U, s, V = mpmath.svd_r(mpmath.matrix(Y.tolist()))
        factors = U * V, V.T * mpmath.diag(s) * V
        return tuple(torch.tensor(np.array(F.tolist(), dtype=float)) for F in factors)  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [(9, 6), (6, 6)])
def test_float64_polar_factors_lose_no_more_than_the_condition(shape: tuple[int, int]) -> None:
    for condition in (2.0, 30.0, 100.0, 1e3, 8e3, 1e5):
        Y = conditioned(shape, condition)
        expected_U, expected_H = exact_polar(Y)
        U, H = linalg.polar(Y)
        eps = torch.finfo(torch.float64).eps
        # A relative change of eps in Y changes U by condition times eps, H by about eps.
        assert (U - expected_U).abs().max() < 4 * condition * eps
        assert (H - expected_H).abs().max() < 20 * eps
        assert linalg.defect(U) < 20 * eps


def symmetric(n: int) -> Tensor:
    A = torch.randn(n, n)
    return (A + A.T) / 2


def stiefel_vector(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    x = Stiefel().random(*shape)
    return x, Stiefel().proju(x, torch.randn(shape) / 8)


# Inputs are made outside of autocast.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "polar": (lambda Y: linalg.polar(Y)[1], lambda: (torch.randn(50, 40),)),
    "qr": (lambda Y: linalg.orthonormalize(Y, "qr"), lambda: (torch.randn(50, 40),)),
    "cayley": (lambda A: linalg.cayley(A - A.mT), lambda: (symmetric(40).tril(),)),
    "cayley_neumann": (lambda A: linalg.cayley_neumann(A - A.mT), lambda: (symmetric(40).tril() / 40,)),
    "SPD.projx": (SPD().projx, lambda: (SPD().random(8, 8) + symmetric(8) / 10,)),
    "SPD.egrad2rgrad": (SPD().egrad2rgrad, lambda: (SPD().random(8, 8), symmetric(8))),
    "SPD.retr": (SPD().retr, lambda: (SPD().random(8, 8), symmetric(8) / 4)),
    "SPD.expmap": (SPD().expmap, lambda: (SPD().random(8, 8), symmetric(8) / 4)),
    "SPD.logmap": (SPD().logmap, lambda: (SPD().random(8, 8), SPD().random(8, 8))),
    "SPD.dist": (SPD().dist, lambda: (SPD().random(8, 8), SPD().random(8, 8))),
    "SPD.transp": (SPD().transp, lambda: (SPD().random(8, 8), SPD().random(8, 8), symmetric(8))),
    "SPD.inner": (SPD().inner, lambda: (SPD().random(8, 8), symmetric(8))),
    "Stiefel.projx": (Stiefel().projx, lambda: (torch.randn(50, 40),)),
    "Stiefel.proju": (Stiefel().proju, lambda: (Stiefel().random(50, 40), torch.randn(50, 40))),
    "Stiefel.expmap": (Stiefel().expmap, lambda: stiefel_vector((50, 40))),
    "Stiefel.inner": (Stiefel().inner, lambda: stiefel_vector((50, 40))),
    "Stiefel.check_point_on_manifold": (Stiefel().check_point_on_manifold, lambda: (Stiefel().random(50, 40),)),
    "Stiefel.check_vector_on_tangent": (Stiefel().check_vector_on_tangent, lambda: stiefel_vector((50, 40))),
    **{f"Stiefel.retr {name}": (Stiefel(name).retr, lambda: stiefel_vector((50, 40))) for name in get_args(Retraction)},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    function, make = FUNCTIONS[name]
    inputs = make()
    expected = function(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (inputs[0] @ inputs[0].mT).dtype == torch.bfloat16
        result = function(*inputs)
    if isinstance(expected, bool):
        assert result is expected is True
    else:
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)


@pytest.mark.parametrize("retraction", get_args(Retraction))
@pytest.mark.parametrize("shape", [(12, 8), (300, 200)])
def test_a_retraction_of_a_strided_point_is_contiguous(retraction: Retraction, shape: tuple[int, int]) -> None:
    manifold = Stiefel(retraction)
    torch.manual_seed(0)
    x, u = stiefel_vector(shape)
    expected = manifold.retr(x, u)
    columns = x.mT.contiguous().mT  # column-major, as LAPACK returns factors
    spaced = torch.stack([x, x], -1)[..., 0]
    for point in (columns, spaced):
        assert not point.is_contiguous()
        result = manifold.retr(point, u)
        assert result.is_contiguous()
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_batches_of_cayley_maps_on_two_threads() -> None:
    """Where torch's own batched LU (2.11 and 2.13, with MKL) may return wrong pivots for more than 128 columns."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        A = torch.randn(8, 256, 256) / 64
        for _ in range(5):
            assert linalg.defect(linalg.cayley(A - A.mT)).max() <= 1e-6
    finally:
        torch.set_num_threads(before)
