"""The spectrum of a weight and how evenly its neurons spread over the sphere: what POET keeps and what it keeps low."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import precision

_BLOCK_ENTRIES = 2**22  # of a block of distances, in float64: 32 MiB


class SpectralSummary(NamedTuple):
    """Five numbers per matrix, float64, each (...)."""

    largest: Tensor
    smallest: Tensor
    condition: Tensor  # largest / smallest; 1e16 or infinite for a singular matrix
    entropy: Tensor  # svd_entropy
    stable_rank: Tensor  # ‖W‖_F² / largest²


def singular_values(W: Tensor) -> Tensor:
    """The min(m, n) singular values of W (..., m, n), descending, float64. R W P has the same. (POET, equation 2.)"""
    precision.compute_dtype(W.dtype)
    if W.ndim < 2 or 0 in W.shape[-2:]:
        raise ValueError(f"expected a matrix (..., m, n) with m, n >= 1, got {tuple(W.shape)}; flatten kernels")
    precision.check_finite(W)
    return torch.linalg.svdvals(W.detach().double())


def svd_entropy(W: Tensor) -> Tensor:
    """H = -Σ_i p_i log p_i / log k with p_i = σ_i² / Σ_j σ_j² and k = min(m, n), of W (..., m, n): (...), float64.

    In [0, 1]: 0 for rank one, 1 where all singular values are equal. POET, section 4 (there printed without the minus) after
    Alter et al. 2000, who divide by the logarithm of the number of singular values; the paper's "n" is read as that.
    """
    return entropy_of(singular_values(W))


def spectral_summary(W: Tensor) -> SpectralSummary:
    """Extremes, condition, `svd_entropy` and stable rank of W (..., m, n), from one decomposition."""
    sigma = singular_values(W)
    largest, smallest = sigma[..., 0], sigma[..., -1]
    entropy = entropy_of(sigma)
    stable_rank = (sigma / largest[..., None]).square().sum(-1)
    return SpectralSummary(largest, smallest, largest / smallest, entropy, stable_rank)


def eigenvalues(T: Tensor) -> Tensor:
    """The eigenvalues of a symmetric T (..., d, d), ascending, float64: of PIT's transform, all positive."""
    precision.check_square(T)
    precision.compute_dtype(T.dtype)
    precision.check_finite(T)
    return torch.linalg.eigvalsh(T.detach().double())


def condition(T: Tensor) -> float:
    """Largest over smallest eigenvalue of a symmetric positive definite T (d, d), in float64.

    A T that was rounded to float32 has no digits left past 1e7; infinite where its smallest eigenvalue is not positive. Of
    PIT's transform use :func:`condition_from_factor`.
    """
    spectrum = eigenvalues(T)
    return (spectrum[-1] / spectrum[0].clamp_min(0)).item()


def condition_from_factor(L: Tensor) -> float:
    """The condition number of T = L Lᵀ from its factor L (d, d): cond(L)², in float64, accurate where T's own is lost."""
    precision.check_square(L)
    sigma = singular_values(L)
    return (sigma[0] / sigma[-1]).square().item()


def hyperspherical_energy(W: Tensor, s: float = 1.0) -> Tensor:
    """HE = Σ_{i≠j} ‖ŵ_i - ŵ_j‖^-s over ordered pairs of normalized rows of W (..., n, d): (...), float64.

    POET, equation 1 (s = 1); Liu et al. 2018. A neuron is a row, as in torch's (out, in) weights; the paper, which writes
    y = Wᵀx, has them in columns. W P with P orthogonal has the same energy, R W in general another. Each pair counts twice;
    equal directions give infinity. n²/2 distances, a block of rows at a time: memory grows with n, not n². Distances
    come from inner products, those of blocks with nearly equal rows from differences, since these carry the sum.
    """
    precision.compute_dtype(W.dtype)
    if W.ndim < 2 or 0 in W.shape[-2:]:
        raise ValueError(f"expected rows (..., n, d) with n, d >= 1, got {tuple(W.shape)}")
    if not 0 < s < math.inf:
        raise ValueError(f"expected a finite exponent s > 0, got {s}")
    precision.check_finite(W)
    rows = W.detach().double()
    # By the largest entry first: squares of tiny and huge rows would leave float64.
    rows = rows / rows.abs().amax(-1, keepdim=True)
    if not torch.isfinite(rows).all():
        raise ValueError("expected rows that are not zero, which have no direction; leave padding out")
    rows = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
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
        energy += 2 * squares.pow_(-s / 2).sum((-2, -1))
    return energy


def entropy_of(sigma: Tensor) -> Tensor:
    """`svd_entropy` of a matrix with these singular values, descending, (..., k)."""
    if sigma.shape[-1] < 2:
        raise ValueError("expected at least two singular values, got one: its entropy over log 1 is 0/0")
    if (sigma[..., 0] == 0).any():
        raise ValueError("expected a matrix other than zero, whose singular values have no distribution")
    squares = (sigma / sigma[..., :1]).square()
    p = squares / squares.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1) / math.log(sigma.shape[-1])
