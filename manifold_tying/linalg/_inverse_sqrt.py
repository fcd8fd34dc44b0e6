"""G^(-1/2) and the polar factor by products alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manifold_tying.linalg._basics import (
    check_finite,
    full_precision,
    gram,
    identity_like,
    row_blocks,
    symmetric,
    working_dtype,
)
from manifold_tying.linalg._polar import polar
from manifold_tying.linalg._rows import Total, nothing_to_add, orthonormalize_rows_

# Coefficients of (1 + x)^(-1/2) = Σ c_k xᵏ.
_SERIES = [1.0]
for _k in range(1, 12):
    _SERIES.append(_SERIES[-1] * (1 - 2 * _k) / (2 * _k))
# |x|: terms that leave less than 1e-7 up to there, or 1e-16.
_TERMS = {torch.float32: {0.08: 6, 0.2: 9, 0.3: 12}, torch.float64: {0.0025: 6, 0.018: 9, 0.05: 12}}
# Where the number of products cannot depend on the data: λ^(-1/2) for λ from here to 1 by a polynomial, in the variable that
# maps those λ to [-1, 1], and then the series for what that leaves, at most 0.07. Condition 10 needs no less than 0.03, since
# the bound on the eigenvalues may be several times too large.
_LOWEST = 0.03
_MIDDLE, _HALF = (1 + _LOWEST) / 2, (1 - _LOWEST) / 2
_POLYNOMIAL = (
    np.polynomial.Chebyshev.interpolate(lambda t: (_MIDDLE + _HALF * t) ** -0.5, 8)
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
# Rounding grows with the condition, and each step takes a factor of 9/4 of it: past these an eigendecomposition does better.
_MOST_STEPS = {torch.float32: 11, torch.float64: 40}


def inverse_sqrt(G: Tensor) -> Tensor:
    """G^(-1/2) of symmetric positive definite G (..., p, p) for G of condition up to about 1e6.

    Near a multiple of the identity, where retractions are, a series: three to five products. Further out coupled
    Newton-Schulz steps of three, and a float64 eigendecomposition where those do not converge, in float32 from conditions
    of some 100 on.
    """
    c, powers, bound = _spread(G)
    largest = bound.amax().item()
    for radius, terms in _TERMS[G.dtype].items():
        if largest < radius:
            return symmetric(_polynomial(powers, _SERIES[:terms])) * c.rsqrt()
    P, left = _newton_schulz(G, c * (1 + bound), _MOST_STEPS[G.dtype], 1e-4 if G.dtype == torch.float32 else 1e-8)
    return P if left <= 1e-3 else _inverse_sqrt_eigh(G)


def inverse_sqrt_fixed(G: Tensor) -> Tensor:
    """G^(-1/2) by eleven products, with no branch on the data: for compiled code and for GPUs.

    Nothing then waits for a number to arrive on the host. For G of condition up to about 10; beyond, it falls short:
    G^(1/2) times the result is symmetric with eigenvalues between 0 and 1. (..., p, p) to (..., p, p).
    """
    c, (E, E2, E3), bound = _spread(G)
    shrink, eye = 1 / (1 + bound), identity_like(G)
    # Q = P - I with P from the polynomial; the powers of its variable aE + bI are sums of those of E.
    a, b = shrink / _HALF, (shrink - _MIDDLE) / _HALF
    square = a**2 * E2 + 2 * a * b * E + b**2 * eye
    cube = a**3 * E3 + 3 * a**2 * b * E2 + 3 * a * b**2 * E + b**3 * eye
    Q = symmetric(_polynomial((a * E + b * eye, square, cube), _POLYNOMIAL)) - eye
    # P G P - I for G over its bound, from differences to the identity: the identity's own rounding would be left over.
    E = shrink * E + (shrink - 1) * eye
    E = E + Q + E @ Q
    E = symmetric(E + Q + Q @ E)
    rest = _polynomial(_powers(E), _SERIES) - eye
    return symmetric(eye + (Q + rest + Q @ rest)) * (c / shrink).rsqrt()


def reorthonormalize(Y: Tensor, total: Total = nothing_to_add) -> Tensor:
    """Polar factor Y (YᵀY)^(-1/2) by products alone, for Y (..., n, p) of condition up to about 100.

    That is every retraction's case: a tangent step makes YᵀY = I + UᵀU >= I. Not differentiable; falls back to
    :func:`polar` where float32 cannot resolve YᵀY.
    """
    return reorthonormalize_(Y.to(working_dtype(Y.dtype), copy=True), total).to(Y.dtype)


def reorthonormalize_(
    Y: Tensor, total: Total = nothing_to_add, *, fixed: bool = False, keep: Tensor | None = None
) -> Tensor:
    """:func:`reorthonormalize` in place, a block of rows at a time; Y float32 or float64.

    Args:
        total: sums YᵀY over the processes that share Y's rows, see :func:`row_total`. Where float32 cannot resolve the sum,
            ValueError for a rank-deficient one.
        fixed: by :func:`inverse_sqrt_fixed`, without looking at a number on the host and without a fallback; so in compiled
            code always.
        keep: with ``fixed``, a scalar on Y's device that leaves Y as it is unless it is 0.
    """
    with full_precision(Y.device):
        if Y.numel() == 0 and total is nothing_to_add:  # no matrices: others share none of these
            return Y
        G = total(gram(Y))
        if fixed or torch.compiler.is_compiling():
            P = inverse_sqrt_fixed(G)
            return multiply_rows_(Y, P if keep is None else torch.where(keep == 0, P, identity_like(P)))
        largest = torch.linalg.matrix_norm(G, ord=float("inf")).amax()
        if not largest < 1e3:
            return _reorthonormalize_far(Y, total)
        P = inverse_sqrt(G)
        amplification = largest * torch.linalg.matrix_norm(P, ord=float("inf")).amax() ** 2
        if not amplification < 1e4:
            return _reorthonormalize_far(Y, total)
        multiply_rows_(Y, P)
        if amplification > 8:  # the rounding of G grows with its condition on the way to G^(-1/2)
            multiply_rows_(Y, 1.5 * identity_like(G) - 0.5 * total(gram(Y)))
        return Y


def _reorthonormalize_far(Y: Tensor, total: Total) -> Tensor:
    return Y.copy_(polar(Y)[0]) if total is nothing_to_add else orthonormalize_rows_(Y, total)


def multiply_rows_(Y: Tensor, P: Tensor) -> Tensor:
    """Y <- Y P in place for Y (..., n, p) and P (..., p, p), holding one block of rows beside it."""
    blocks = row_blocks(Y)
    buffer = Y.new_empty(*Y.shape[:-2], blocks[0].stop, Y.shape[-1])
    for rows in blocks:
        part = Y[..., rows, :]
        part.copy_(torch.matmul(part, P, out=buffer[..., : part.shape[-2], :]))
    return Y


def _spread(G: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """c, the first three powers of E and a bound on E's spectral norm, where G = c (I + E) and E has trace 0.

    The bound ‖E³‖_F^(1/3) is within a factor of p^(1/6), which it would be only for a multiple of an orthogonal matrix. It and
    c are (..., 1, 1).
    """
    c = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-30)
    powers = _powers(G / c - identity_like(G))
    return c, powers, torch.linalg.matrix_norm(powers[2])[..., None, None] ** (1 / 3)


def _powers(E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    E2 = E @ E
    return E, E2, E2 @ E


def _polynomial(powers: tuple[Tensor, Tensor, Tensor], coefficients: Sequence[float]) -> Tensor:
    """Σ c_k Eᵏ of three coefficients or a multiple, in E³ with coefficients of degree 2 (Paterson and Stockmeyer 1973)."""
    E, E2, E3 = powers
    eye = identity_like(E)
    result: Tensor | None = None
    for k in range(len(coefficients) - 3, -1, -3):
        a, b, c = coefficients[k : k + 3]
        part = torch.add(a * eye, E, alpha=b).add_(E2, alpha=c)
        result = part if result is None else part + result @ E3
    assert result is not None
    return result


def _newton_schulz(G: Tensor, c: Tensor, steps: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """G^(-1/2) by the coupled iteration on G/c, c >= ‖G‖_2, and its last correction's norm; stops at the tolerance.

    P -> (G/c)^(-1/2) and Y -> (G/c)^(1/2) are kept as Q = P - I and F = Y - I, which keeps the rounding of the identity out:
    it leaves 1e-7 to 3e-7 in float32 where the plain form leaves 2e-6.
    """
    eye = identity_like(G)
    F, Q = G / c - eye, torch.zeros_like(G)
    size = torch.zeros_like(c)
    for _ in range(steps):
        half_residual = (F + Q + Q @ F) / -2
        F = F + half_residual + F @ half_residual
        Q = Q + half_residual + half_residual @ Q
        # Convergence is quadratic: a correction of the tolerance leaves its square.
        if not (size := torch.linalg.matrix_norm(half_residual).amax()) > tolerance:
            break  # also when it is NaN
    return symmetric(eye + Q) * c.rsqrt(), size


def _inverse_sqrt_eigh(G: Tensor) -> Tensor:
    check_finite(G)
    eigenvalues, V = torch.linalg.eigh(G.double())
    floor = eigenvalues[..., -1:] * 1e-15
    return ((V * eigenvalues.clamp_min(floor).rsqrt()[..., None, :]) @ V.mT).to(G.dtype)
