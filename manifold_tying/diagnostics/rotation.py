"""Measure how far POET's orthogonal factors have rotated, and how orthogonal they are."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import linalg, precision


class TraceProbe(NamedTuple):
    """Mean and standard deviation of vᵀRv over the unit sphere, float64, each (...)."""

    mean: Tensor
    std: Tensor


class Phases(NamedTuple):
    """First steps of POET's phases II (stable learning) and III (final adjusting); None if not found."""

    stable: int | None
    final: int | None


def vector_probe(R: Tensor, v: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """cos(v, Rv) = vᵀRv / (‖v‖ ‖Rv‖) of R (..., m, m) and v (m,) or (..., m): (...), float64. (POET, appendix A.1.)

    Without v, draws a normal v from ``generator``, by default a new one with seed 0: all calls with the same m use the same v,
    as in the paper, and torch's global generator does not change. Dividing by ‖Rv‖ matters if R is only nearly orthogonal.
    """
    m = _checked_size(R)
    if v is None:
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        v = torch.randn(m, dtype=torch.float64, device=generator.device, generator=generator)
    elif generator is not None:
        raise ValueError("expected a vector v or a generator to draw one, got both")
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


def phases(
    steps: Sequence[int],
    values: Sequence[float],
    learning_rates: Sequence[float],
    *,
    tolerance: float = 0.025,
    settled: float = 0.0025,
) -> Phases:
    """Find where a curve of probes enters POET's phases II and III. The paper judges by eye; these rules are ours.

    The plateau is the median of the second half of the records. ``stable`` is the first step with a value within ``tolerance``
    of it (default: half the width of the paper's band, 0.6 to 0.65). It is None if the curve still moves: the medians of the
    last two quarters differ by more. ``final`` is the first step after which no value is more than ``settled`` away from the
    last one. It is not before ``stable``, and after the last step with the highest learning rate; None if only the last record
    qualifies. On a flat plateau, ``final`` mostly shows when the decay began. A cosine decay begins after the warm-up, so there
    ``final`` mostly shows when the curve became flat. (POET, appendix A.3.)
    """
    curve, rates = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (values, learning_rates))
    n = len(steps)
    if n < 4 or curve.shape != (n,) or rates.shape != (n,):
        found = f"{n}, {tuple(curve.shape)} and {tuple(rates.shape)}"
        raise ValueError(f"expected steps, values and learning rates of one length >= 4, got {found}")
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError("expected increasing steps; sort the records, and drop those that a resumed run repeated")
    precision.check_finite(torch.stack([curve, rates]))
    if abs(curve[n // 2 : 3 * n // 4].median() - curve[3 * n // 4 :].median()) > tolerance:
        return Phases(None, None)
    near = (curve - curve[n // 2 :].median()).abs() <= tolerance
    stable = int(near.nonzero()[0])
    before = (rates >= rates.max() * (1 - 1e-6)) | ((curve - curve[-1]).abs() > settled)
    final = max(stable, int(before.nonzero()[-1]) + 1)
    return Phases(int(steps[stable]), int(steps[final]) if final < n - 1 else None)
