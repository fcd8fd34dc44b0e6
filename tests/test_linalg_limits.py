"""Factors and maps at the limits: ill-conditioned, under autocast, and in unusual memory layouts."""

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from manifold_tying import linalg


def conditioned(n: int, p: int, condition: float) -> Tensor:
    """A float64 matrix (n, p) with singular values from 1 down to 1/condition."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(m, p, dtype=torch.float64))[0] for m in (n, p))
    return (U * torch.logspace(0, -np.log10(condition), p, dtype=torch.float64)) @ V.T


def exact_polar(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Polar factors of a small float64 matrix, by an SVD with 40 digits."""
    with mpmath.workdps(40):
        U, s, V = mpmath.svd_r(mpmath.matrix(Y.tolist()))
        factors = U * V, V.T * mpmath.diag(s) * V
        return tuple(torch.tensor(np.array(F.tolist(), dtype=float)) for F in factors)  # type: ignore[return-value]


@pytest.mark.parametrize("condition", [2.0, 30.0, 100.0, 1e3, 8e3, 1e5])
@pytest.mark.parametrize("shape", [(9, 6), (6, 6)])
def test_float64_polar_factors_lose_no_more_than_the_condition(shape: tuple[int, int], condition: float) -> None:
    Y = conditioned(*shape, condition)
    expected_U, expected_H = exact_polar(Y)
    U, H = linalg.polar(Y)
    eps = torch.finfo(torch.float64).eps
    # A relative change of eps in Y changes U by condition times eps, H by about eps.
    assert (U - expected_U).abs().max() < 4 * condition * eps
    assert (H - expected_H).abs().max() < 20 * eps
    assert linalg.defect(U) < 20 * eps
