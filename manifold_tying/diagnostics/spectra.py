"""Singular values, which POET preserves, hyperspherical energy, which it keeps low, and how far R and P have rotated."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import linalg, precision

_BLOCK_ENTRIES = 2**22  # a block of distances in float64: 32 MiB


class SpectralSummary(NamedTuple):
    """Five numbers per matrix, float64, each (...)."""

    largest: Tensor
    smallest: Tensor
    condition: Tensor  # largest / smallest; about 1e16 or infinite for a singular matrix
    entropy: Tensor  # svd_entropy
    stable_rank: Tensor  # ‖W‖_F² / largest²


def singular_values(W: Tensor) -> Tensor:
    """The min(m, n) singular values of W (..., m, n), descending, float64; R W P has the same ones. (POET, equation 2.)"""
    precision.compute_dtype(W.dtype)
    if W.ndim < 2 or 0 in W.shape[-2:]:
        raise ValueError(f"expected a matrix (..., m, n) with m, n >= 1, got {tuple(W.shape)}; flatten kernels")
    precision.check_finite(W)
    sigma: Tensor = torch.linalg.svdvals(W.detach().double())
    return sigma


def svd_entropy(W: Tensor) -> Tensor:
    """H = -Σ_i p_i log p_i / log k with p_i = σ_i² / Σ_j σ_j² and k = min(m, n), of W (..., m, n): (...), float64.

    Between 0 (rank one) and 1 (equal singular values). Defined in POET, section 4 (printed without the minus), after Alter et
    al. 2000, who divide by the logarithm of the number of singular values; we read the paper's "n" as that number.
    """
    return entropy_of(singular_values(W))


def spectral_summary(W: Tensor) -> SpectralSummary:
    """Extremes, condition, :func:`svd_entropy` and stable rank of W (..., m, n), from one decomposition."""
    sigma = singular_values(W)
    largest, smallest = sigma[..., 0], sigma[..., -1]
    stable_rank = (sigma / largest[..., None]).square().sum(-1)
    return SpectralSummary(largest, smallest, largest / smallest, entropy_of(sigma), stable_rank)


def condition_from_factor(L: Tensor) -> float:
    """The condition number of T = L Lᵀ from L (d, d): cond(L)², in float64; accurate even if T is ill-conditioned.

    Infinite if L is singular.
    """
    precision.check_square(L)
    sigma = singular_values(L)
    return (sigma[0] / sigma[-1]).square().item() if sigma[-1] > 0 else math.inf


def hyperspherical_energy(W: Tensor) -> Tensor:
    """HE = Σ_{i≠j} 1 / ‖ŵ_i - ŵ_j‖ over ordered pairs of normalized rows of W (..., n, d): (...), float64.

    POET, equation 1; Liu et al. 2018. A neuron is a row, as in torch's (out, in) weights; the paper writes y = Wᵀx and
    has neurons in columns. W P with an orthogonal P has the same energy; R W in general does not. Each pair counts twice. Equal
    directions give infinity. The n²/2 distances are computed in blocks of rows, so memory grows with n, not n². They come from
    inner products, or from differences in blocks with nearly equal rows, whose terms dominate the sum.
    """
    precision.compute_dtype(W.dtype)
    if W.ndim < 2 or 0 in W.shape[-2:]:
        raise ValueError(f"expected rows (..., n, d) with n, d >= 1, got {tuple(W.shape)}")
    precision.check_finite(W)
    rows = W.detach().double()
    # Divide by the largest entry first: squares of tiny or huge entries would leave float64's range.
    rows = rows / rows.abs().amax(-1, keepdim=True)
    if not torch.isfinite(rows).all():
        raise ValueError("expected nonzero rows, since a zero row has no direction; leave padding out")
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    rows = rows / lengths
    n = rows.shape[-2]
    height = max(1, _BLOCK_ENTRIES // (n * max(1, rows[..., 0, 0].numel())))
    energy = rows.new_zeros(rows.shape[:-2])
    for start in range(0, n, height):
        block, rest = rows[..., start : start + height, :], rows[..., start:, :]
        squares = torch.matmul(block, rest.mT).mul_(-2).add_(2)
        others = torch.ones(squares.shape[-2:], dtype=torch.bool, device=rows.device).triu_(1)
        squares.masked_fill_(~others, math.inf)
        if (squares < 1e-4).any():
            squares = torch.cdist(block, rest, compute_mode="donot_use_mm_for_euclid_dist").square_()
            squares.masked_fill_(~others, math.inf)
        energy += 2 * squares.rsqrt_().sum((-2, -1))
    return energy


def entropy_of(sigma: Tensor) -> Tensor:
    """:func:`svd_entropy` of a matrix from its singular values (..., k), descending."""
    if sigma.shape[-1] < 2:
        raise ValueError("expected at least two singular values, got one: the normalized entropy would be 0/0")
    if (sigma[..., 0] == 0).any():
        raise ValueError("expected a nonzero matrix, got zero: its singular values have no distribution")
    squares = (sigma / sigma[..., :1]).square()
    terms: Tensor = torch.special.entr(squares / squares.sum(-1, keepdim=True))
    return terms.sum(-1) / math.log(sigma.shape[-1])


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
