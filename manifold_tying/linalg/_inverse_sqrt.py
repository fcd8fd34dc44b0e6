"""G^(-1/2) by matmuls."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manifold_tying.precision import check_finite, compute_dtype, eye_like, full_precision, sym

# Coefficients of (1 + x)^(-1/2) = Σ c_k xᵏ.
_SERIES = [1.0]
for _k in range(1, 12):
    _SERIES.append(_SERIES[-1] * (1 - 2 * _k) / (2 * _k))
# Upper bound on |x|: number of terms whose error is below 1e-7, or 1e-16.
_TERMS = {torch.float32: {0.08: 6, 0.2: 9, 0.3: 12}, torch.float64: {0.0025: 6, 0.018: 9, 0.05: 12}}
# For larger |x|, a polynomial first approximates λ^(-1/2) for λ from _LOWEST to 1, mapped to [-1, 1]. It leaves |x| <= 0.07 and
# multiplies smaller λ by up to 61.
_LOWEST = 0.03
_MIDDLE, _HALF = (1 + _LOWEST) / 2, (1 - _LOWEST) / 2
_COEFFICIENTS = (
    np.polynomial.Chebyshev.interpolate(lambda t: (_MIDDLE + _HALF * t) ** -0.5, 8)
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
# Rounding grows with the condition: after this many polynomials an eigendecomposition is more accurate.
_MAX_POLYNOMIALS = {torch.float32: 1, torch.float64: 6}

Powers = tuple[Tensor, Tensor, Tensor]


def inverse_sqrt(G: Tensor) -> Tensor:
    """G^(-1/2) of symmetric positive definite G (..., p, p) of condition up to about 1e6.

    Close to a multiple of the identity, as in retractions: a series, three to five matmuls. Otherwise ten to twelve, with a
    polynomial first. If that does not suffice (in float32 from a condition of about 100), a float64 eigendecomposition.
    """
    W = G.to(compute_dtype(G.dtype))
    if W.numel() == 0:
        return G.clone()
    with full_precision(G.device):
        P = _by_matmuls(W, _MAX_POLYNOMIALS[W.dtype])
        return (_inverse_sqrt_eigh(W) if P is None else P).to(G.dtype)


def _by_matmuls(G: Tensor, polynomials: int) -> Tensor | None:
    """G^(-1/2) by at most this many polynomials; None if they do not suffice."""
    eye = eye_like(G)
    c, powers, bound = _normalized(G)
    rest = _series(powers, bound)
    if rest is not None:
        return sym(eye + rest) * c.rsqrt()
    if not polynomials:
        return None
    Q, E, scale = _polynomial(c, powers, bound)
    powers = _powers(E)
    rest = _series(powers, _bound(powers))
    if rest is None:
        root = _by_matmuls(eye + E, polynomials - 1)
        if root is None:
            return None
        rest = root - eye
    return _compose(Q, rest) * scale


def polar_near_identity(Z: Tensor) -> Tensor | None:
    """Z (ZᵀZ)^(-1/2) to float32 precision for one matrix Z (n, p) near a multiple of an orthonormal one; None for others.

    Horner's rule takes more matmuls than :func:`_sum` but fewer operations, which is faster for small p.
    """
    c = torch.linalg.vector_norm(Z).item() ** 2 / Z.shape[-1]
    if not c > 0:
        return None
    E = torch.addmm(eye_like(Z), Z.mT, Z, beta=-1, alpha=1 / c)  # ZᵀZ = c (I + E), and E has trace 0
    bound = torch.linalg.vector_norm(E @ E).item() ** 0.5
    for radius, terms in _TERMS[torch.float32].items():
        if bound < radius:
            rest = E * _SERIES[terms - 1]
            for coefficient in _SERIES[terms - 2 : 0 : -1]:
                rest = torch.addmm(E, E, rest, beta=coefficient)
            return torch.addmm(Z, Z, rest, beta=c**-0.5, alpha=c**-0.5)
    return None


def inverse_sqrt_sync_free(G: Tensor) -> Tensor:
    """G^(-1/2), (..., p, p), by twelve matmuls, without a sync or a branch on the data: for GPUs and compiled code.

    For G of condition up to about 10. Beyond, the result is too small: G^(1/2) times it is symmetric with eigenvalues between
    0 and 1.
    """
    Q, E, scale = _polynomial(*_normalized(G))
    return _compose(Q, _sum(_powers(E), _SERIES) - eye_like(G)) * scale


def _normalized(G: Tensor) -> tuple[Tensor, Powers, Tensor]:
    """c, the powers of E and a bound on ‖E‖₂, for G = c (I + E) with trace E = 0; c and bound (..., 1, 1)."""
    c = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(G.dtype).tiny)
    powers = _powers(G / c - eye_like(G))
    return c, powers, _bound(powers)


def _powers(E: Tensor) -> Powers:
    """E, E² and E³."""
    E2 = E @ E
    return E, E2, E2 @ E


def _bound(powers: Powers) -> Tensor:
    """‖E³‖_F^(1/3): an upper bound on ‖E‖₂, loose by at most p^(1/6)."""
    return torch.linalg.matrix_norm(powers[2])[..., None, None] ** (1 / 3)


def _series(powers: Powers, bound: Tensor) -> Tensor | None:
    """(I + E)^(-1/2) - I; None if it needs too many terms."""
    largest = bound.amax().item()
    for radius, terms in _TERMS[bound.dtype].items():
        if largest < radius:
            return _sum(powers, _SERIES[:terms]) - eye_like(powers[0])
    return None


def _polynomial(c: Tensor, powers: Powers, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, E' and scale such that P = scale (I + Q) has P G P = I + E', for G = c (I + E), ‖E‖ <= bound."""
    E, E2, E3 = powers
    shrink, eye = 1 / (1 + bound), eye_like(E)
    # The powers of the variable aE + bI are sums of those of E.
    a, b = shrink / _HALF, (shrink - _MIDDLE) / _HALF
    square = a**2 * E2 + 2 * a * b * E + b**2 * eye
    cube = a**3 * E3 + 3 * a**2 * b * E2 + 3 * a * b**2 * E + b**3 * eye
    Q = sym(_sum((a * E + b * eye, square, cube), _COEFFICIENTS)) - eye
    # Work with deviations from I to avoid cancellation.
    E = shrink * E + (shrink - 1) * eye
    E = E + Q + E @ Q
    return Q, sym(E + Q + Q @ E), (shrink / c).sqrt()


def _sum(powers: Powers, coefficients: Sequence[float]) -> Tensor:
    """Σ c_k Eᵏ of three coefficients or a multiple, in E³ with coefficients of degree 2 (Paterson and Stockmeyer 1973)."""
    E, E2, E3 = powers
    eye = eye_like(E)
    result: Tensor | None = None
    for k in range(len(coefficients) - 3, -1, -3):
        a, b, c = coefficients[k : k + 3]
        part = torch.add(a * eye, E, alpha=b).add_(E2, alpha=c)
        result = part if result is None else part + result @ E3
    assert result is not None
    return result


def _compose(Q: Tensor, rest: Tensor) -> Tensor:
    """(I + Q)(I + rest) of matrices that commute up to rounding."""
    return sym(eye_like(Q) + (Q + rest + Q @ rest))


def _inverse_sqrt_eigh(G: Tensor) -> Tensor:
    check_finite(G)
    eigenvalues, V = torch.linalg.eigh(G.double())
    floor = eigenvalues[..., -1:] * 1e-15
    return ((V * eigenvalues.clamp_min(floor).rsqrt()[..., None, :]) @ V.mT).to(G.dtype)
