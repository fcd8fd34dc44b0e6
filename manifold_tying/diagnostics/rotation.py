"""Measure how far POET's orthogonal factors have rotated, and how orthogonal they are."""

from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import linalg, precision


class TraceProbe(NamedTuple):
    """Mean and standard deviation of vᵀRv over the unit sphere, float64, each (...)."""

    mean: Tensor
    std: Tensor


def vector_probe(R: Tensor, v: Tensor | None = None) -> Tensor:
    """cos(v, Rv) = vᵀRv / (‖v‖ ‖Rv‖) of R (..., m, m) and v (m,) or (..., m): (...), float64. (POET, appendix A.1.)

    Without v, draws a normal v from a generator with seed 0: all calls with the same m use the same v, as in the paper.
    Dividing by ‖Rv‖ matters if R is only nearly orthogonal.
    """
    m = _checked_size(R)
    if v is None:
        v = torch.randn(m, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))
    elif v.ndim < 1 or v.shape[-1] != m or not (v != 0).any(-1).all():
        raise ValueError(f"expected v (..., {m}), not zero, for R {tuple(R.shape)}; got {tuple(v.shape)}")
    v = v.detach().to(R.device, torch.float64)
    return torch.cosine_similarity(v, (R.detach().double() @ v[..., None])[..., 0], dim=-1, eps=0)


def trace_probe(R: Tensor) -> TraceProbe:
    """E[vᵀRv] = tr R / m and the standard deviation of vᵀRv for v uniform on the unit sphere, R (..., m, m).

    These are POET's equations 9 and 13, but the last sign of 13 must be a minus. With S = (R + Rᵀ)/2 the second moment (11) is
    (tr² R + 2‖S‖_F²) / (m(m + 2)) (printed without the square), and 2‖S‖_F² = tr R² + m. So
    Var = (m + tr R² - 2 tr² R / m) / (m(m + 2)) = 2‖S - (tr R / m) I‖_F² / (m(m + 2)), which is zero at R = I. The code uses
    the last form, because it avoids cancellation and holds for any square R.
    """
    m = _checked_size(R)
    S = precision.sym(R.detach().double())
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)
    deviation = torch.linalg.matrix_norm(S - mean[..., None, None] * precision.eye_like(S))
    return TraceProbe(mean, deviation * (2 / (m * (m + 2))) ** 0.5)


def orthogonality_error(R: Tensor) -> Tensor:
    """e_orth = ‖RRᵀ - I‖_F / ‖I‖_F of R (..., m, m): (...), float64. (POET, section 5; equals ``defect`` for square R.)"""
    _checked_size(R)
    return linalg.defect(R.detach())


def _checked_size(R: Tensor) -> int:
    precision.check_square(R)
    precision.compute_dtype(R.dtype)
    return R.shape[-1]
