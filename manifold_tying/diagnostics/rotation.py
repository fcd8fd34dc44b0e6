"""How far POET's orthogonal factors have turned, and how orthogonal they are."""

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
    """Where POET's phases meet: the first steps of stable learning and of final adjusting; None where there is none."""

    stable: int | None
    final: int | None


def vector_probe(R: Tensor, v: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
    """cos(v, Rv) = vᵀRv / (‖v‖ ‖Rv‖) of R (..., m, m) and v (m,) or (..., m): (...), float64. (POET, appendix A.1.)

    Without v: a normal one from `generator`, or from seed 0, so that every call with the same m probes with the same v, as
    in the paper, and torch's own generator stays as it is. Dividing by ‖Rv‖ matters where R is only nearly orthogonal.
    """
    precision.check_square(R)
    precision.compute_dtype(R.dtype)
    m = R.shape[-1]
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
    """E[vᵀRv] = tr R / m and the standard deviation of vᵀRv, v uniform on the unit sphere, of R (..., m, m).

    POET, equations 9 and 13, where the last sign must be a minus: with S = (R + Rᵀ)/2 the second moment (11) is
    (tr² R + 2‖S‖_F²) / (m(m + 2)) (printed without the square), and 2‖S‖_F² = tr R² + m, hence
    Var = (m + tr R² - 2 tr² R / m) / (m(m + 2)) = 2‖S - (tr R / m) I‖_F² / (m(m + 2)), zero at R = I as it has to be. The
    last form is computed: it does not cancel, and holds for any square R.
    """
    precision.check_square(R)
    precision.compute_dtype(R.dtype)
    m = R.shape[-1]
    S = precision.sym(R.detach().double())
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)
    deviation = torch.linalg.matrix_norm(S - mean[..., None, None] * precision.eye_like(S))
    return TraceProbe(mean, deviation * (2 / (m * (m + 2))) ** 0.5)


def orthogonality_error(R: Tensor) -> Tensor:
    """e_orth = ‖RRᵀ - I‖_F / ‖I‖_F of R (..., m, m): (...), float64. (POET, section 5; for square R the `defect`.)"""
    precision.check_square(R)
    precision.compute_dtype(R.dtype)
    return linalg.defect(R.detach())


def phases(
    steps: Sequence[int],
    values: Sequence[float],
    learning_rates: Sequence[float],
    *,
    tolerance: float = 0.025,
    settled: float = 0.0025,
) -> Phases:
    """Where a curve of probes enters POET's phases II and III. The paper names the phases by eye; these rules are ours.

    The plateau is the median of the second half of the records. `stable` is the first step whose value lies within
    `tolerance` of it (default: half the width of the paper's band, 0.6 to 0.65); None where the medians of the last two
    quarters differ by more, so that the curve still moves. `final` is the first step, past `stable` and past the last one
    with the highest learning rate, from which on no value is more than `settled` away from the last; None where
    only the last record would be. A plateau is flat already, so `final` says little more than when the decay began, and with
    a cosine decay, which begins after the warm-up, little more than when the curve got flat. (POET, appendix A.3.)
    """
    curve, rates = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (values, learning_rates))
    n = len(steps)
    if n < 4 or curve.shape != (n,) or rates.shape != (n,):
        found = f"{n}, {tuple(curve.shape)} and {tuple(rates.shape)}"
        raise ValueError(f"expected steps, values and learning rates of one length >= 4, got {found}")
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError("expected increasing steps; sort the records, and drop those that a resumed run wrote again")
    precision.check_finite(torch.stack([curve, rates]))
    if abs(curve[n // 2 : 3 * n // 4].median() - curve[3 * n // 4 :].median()) > tolerance:
        return Phases(None, None)
    near = (curve - curve[n // 2 :].median()).abs() <= tolerance
    stable = int(near.nonzero()[0])
    before = (rates >= rates.max() * (1 - 1e-6)) | ((curve - curve[-1]).abs() > settled)
    final = max(stable, int(before.nonzero()[-1]) + 1)
    return Phases(int(steps[stable]), int(steps[final]) if final < n - 1 else None)
