"""G^(-1/2) by products alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manifold_tying.linalg._precision import check_finite, compute_dtype, eye_like, full_precision, sym

# Coefficients of (1 + x)^(-1/2) = Σ c_k xᵏ.
_SERIES = [1.0]
for _k in range(1, 12):
    _SERIES.append(_SERIES[-1] * (1 - 2 * _k) / (2 * _k))
# |x|: terms that leave less than 1e-7 up to there, or 1e-16.
_TERMS = {torch.float32: {0.08: 6, 0.2: 9, 0.3: 12}, torch.float64: {0.0025: 6, 0.018: 9, 0.05: 12}}
# Further out, first λ^(-1/2) by a polynomial for λ from here to 1, in the variable that maps those λ to [-1, 1]. It leaves an x
# of at most 0.07, and takes smaller λ up by a factor of 61.
_LOWEST = 0.03
_MIDDLE, _HALF = (1 + _LOWEST) / 2, (1 - _LOWEST) / 2
_COEFFICIENTS = (
    np.polynomial.Chebyshev.interpolate(lambda t: (_MIDDLE + _HALF * t) ** -0.5, 8)
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
# Rounding grows with the condition: past so many polynomials an eigendecomposition does better.
_MOST_POLYNOMIALS = {torch.float32: 1, torch.float64: 6}

Powers = tuple[Tensor, Tensor, Tensor]


def inverse_sqrt(G: Tensor) -> Tensor:
    """G^(-1/2) of symmetric positive definite G (..., p, p) for G of condition up to about 1e6.

    Near a multiple of the identity, where retractions are, a series: three to five products. Further out ten to twelve, the
    first ones for a polynomial that takes G there, and a float64 eigendecomposition where that does not suffice, in float32
    from conditions of some 100 on.
    """
    W = G.to(compute_dtype(G.dtype))
    if W.numel() == 0:
        return G.clone()
    with full_precision(G.device):
        P = _by_products(W, _MOST_POLYNOMIALS[W.dtype])
        return (_inverse_sqrt_eigh(W) if P is None else P).to(G.dtype)


def _by_products(G: Tensor, polynomials: int) -> Tensor | None:
    """G^(-1/2) by at most so many polynomials; None where they do not suffice."""
    eye = eye_like(G)
    c, powers, bound = _spread(G)
    rest = _series(powers, bound)
    if rest is not None:
        return sym(eye + rest) * c.rsqrt()
    if not polynomials:
        return None
    Q, E, scale = _polynomial(c, powers, bound)
    powers = _powers(E)
    rest = _series(powers, _bound(powers))
    if rest is None:
        root = _by_products(eye + E, polynomials - 1)
        if root is None:
            return None
        rest = root - eye
    return _composed(Q, rest) * scale


def times_inverse_sqrt(Z: Tensor) -> Tensor | None:
    """Z (ZᵀZ)^(-1/2) to float32's precision for one matrix Z (n, p) near a multiple of an orthonormal one; else None.

    Horner's rule takes more products than :func:`_sum` but fewer operations, whose number decides where p is small.
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
    """G^(-1/2) by twelve products, with no branch on the data: for compiled code and for GPUs.

    Nothing then waits for a number to arrive on the host. For G of condition up to about 10; beyond, it falls short:
    G^(1/2) times the result is symmetric with eigenvalues between 0 and 1. (..., p, p) to (..., p, p).
    """
    Q, E, scale = _polynomial(*_spread(G))
    return _composed(Q, _sum(_powers(E), _SERIES) - eye_like(G)) * scale


def _spread(G: Tensor) -> tuple[Tensor, Powers, Tensor]:
    """c, the powers of E and a bound on its spectral norm, where G = c (I + E) and E has trace 0; c and bound (..., 1, 1)."""
    c = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(G.dtype).tiny)
    powers = _powers(G / c - eye_like(G))
    return c, powers, _bound(powers)


def _powers(E: Tensor) -> Powers:
    """E, E² and E³."""
    E2 = E @ E
    return E, E2, E2 @ E


def _bound(powers: Powers) -> Tensor:
    """‖E³‖_F^(1/3), within a factor of p^(1/6) of ‖E‖_2, which it would be only for a multiple of an orthogonal matrix."""
    return torch.linalg.matrix_norm(powers[2])[..., None, None] ** (1 / 3)


def _series(powers: Powers, bound: Tensor) -> Tensor | None:
    """(I + E)^(-1/2) - I; None where it takes too many terms."""
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
    # From differences to the identity, whose own rounding would be left over.
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


def _composed(Q: Tensor, rest: Tensor) -> Tensor:
    """(I + Q)(I + rest) of matrices that commute but for rounding."""
    return sym(eye_like(Q) + (Q + rest + Q @ rest))


def _inverse_sqrt_eigh(G: Tensor) -> Tensor:
    check_finite(G)
    eigenvalues, V = torch.linalg.eigh(G.double())
    floor = eigenvalues[..., -1:] * 1e-15
    return ((V * eigenvalues.clamp_min(floor).rsqrt()[..., None, :]) @ V.mT).to(G.dtype)
