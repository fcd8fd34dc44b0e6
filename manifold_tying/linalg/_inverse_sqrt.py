"""G^(-1/2) by matmuls, and with it the polar factor of nearly orthonormal matrices: the last part of every retraction."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manifold_tying.distributed import Reduce, is_dtensor, no_reduce, row_reduce, to_local
from manifold_tying.linalg._polar import polar
from manifold_tying.precision import (
    check_finite,
    compute_dtype,
    eye_like,
    full_precision,
    gram,
    gram_in_double,
    row_chunks,
    sym,
)

# On a CPU, up to this size, float64 with few operations is faster than many small float32 matmuls.
_FEW_COLUMNS = 32
_FEW_ENTRIES = 2**14


def reorthonormalize(Y: Tensor, reduce: Reduce = no_reduce) -> Tensor:
    """Polar factor Y (YᵀY)^(-1/2) by matmuls, for Y (..., n, p) of condition up to about 100.

    Every retraction qualifies: a tangent step makes YᵀY = I + UᵀU >= I. Uses :func:`polar` if a gradient is needed or float32
    cannot resolve YᵀY.
    """
    if torch.is_grad_enabled() and Y.requires_grad:
        return polar(Y)[0]
    copy = Y.to(compute_dtype(Y.dtype), copy=True, memory_format=torch.contiguous_format)
    return reorthonormalize_(copy, reduce).to(Y.dtype)


def reorthonormalize_(
    Y: Tensor, reduce: Reduce = no_reduce, *, sync_free: bool = False, skip: Tensor | None = None
) -> Tensor:
    """:func:`reorthonormalize` in place, one block of rows at a time; Y float32 or float64.

    Args:
        reduce: sums YᵀY over the ranks that share Y's rows, see :func:`row_reduce`. If float32 cannot resolve the sum, a
            rank-deficient one raises ValueError.
        sync_free: use :func:`inverse_sqrt_sync_free`, without a sync and without a fallback; always on in compiled code.
        skip: with ``sync_free``, a scalar on Y's device; unless it is 0, Y stays unchanged.
    """
    small = Y.dtype == torch.float32 and Y.shape[-1] <= _FEW_COLUMNS and Y.numel() <= _FEW_ENTRIES
    if small and Y.device.type == "cpu" and reduce is no_reduce and not sync_free and not torch.compiler.is_compiling():
        return _reorthonormalize_small_(Y)
    with full_precision(Y.device):
        if Y.numel() == 0 and reduce is no_reduce:  # no matrices, so no collective either
            return Y
        G = reduce(gram(Y))
        if sync_free or torch.compiler.is_compiling():
            P = inverse_sqrt_sync_free(G)
            return multiply_rows_(Y, P if skip is None else torch.where(skip == 0, P, eye_like(P)))
        largest = torch.linalg.matrix_norm(G, ord=float("inf")).amax()
        if not largest < 1e3:
            return _fallback_(Y, reduce)
        P = inverse_sqrt(G)
        amplification = largest * torch.linalg.matrix_norm(P, ord=float("inf")).amax() ** 2
        if not amplification < 1e4:
            return _fallback_(Y, reduce)
        multiply_rows_(Y, P)
        if amplification > 8:  # the rounding of G is amplified by its condition
            multiply_rows_(Y, 1.5 * eye_like(G) - 0.5 * reduce(gram(Y)))
        return Y


def _reorthonormalize_small_(Y: Tensor) -> Tensor:
    if Y.numel() == 0:
        return Y
    Z = Y.double()
    X = polar_near_identity(Z) if Z.ndim == 2 else None
    if X is not None:
        return Y.copy_(X)
    try:
        eigenvalues, V = torch.linalg.eigh(Z.mT @ Z)
    except torch.linalg.LinAlgError:  # NaN or Inf; the fallback raises a clear error
        return _fallback_(Y, no_reduce)
    smallest, largest = torch.aminmax(eigenvalues)
    if not float(smallest) > 1e-7 * float(largest):
        return _fallback_(Y, no_reduce)
    return Y.copy_(Z @ ((V * eigenvalues.rsqrt()[..., None, :]) @ V.mT))


def _fallback_(Y: Tensor, reduce: Reduce) -> Tensor:
    return Y.copy_(polar(Y)[0]) if reduce is no_reduce else orthonormalize_rows_(Y, reduce)


def multiply_rows_(Y: Tensor, P: Tensor) -> Tensor:
    """Y <- Y P in place for Y (..., n, p) and P (..., p, p), with a buffer for one block of rows."""
    blocks = row_chunks(Y)
    buffer = Y.new_empty(*Y.shape[:-2], blocks[0].stop, Y.shape[-1])
    for rows in blocks:
        part = Y[..., rows, :]
        part.copy_(torch.matmul(part, P, out=buffer[..., : part.shape[-2], :]))
    return Y


def orthonormalize_rows_(Y: Tensor, reduce: Reduce) -> Tensor:
    """Y <- its polar factor Y (YᵀY)^(-1/2), for this rank's rows of a matrix (..., n, p) of condition up to about 1e6.

    In float64 by the eigenvalues of YᵀY: one all-reduce, two for a condition above 1e3. ValueError on all ranks alike if the
    matrix is rank-deficient or not finite.
    """
    for _ in range(2):
        G = reduce(gram_in_double(Y))
        eigenvalues, V = torch.linalg.eigh(G) if torch.isfinite(G).all() else (G.new_full(G.shape[:-1], torch.nan), G)
        smallest, largest = eigenvalues.amin(-1), eigenvalues.amax(-1)
        if not (smallest > 1e-13 * largest).all():
            raise ValueError(
                "expected a finite matrix of full column rank, to find the nearest orthonormal one, got squared singular "
                f"values from {float(smallest.min()):.1e} to {float(largest.max()):.1e}"
            )
        P = (V / eigenvalues.sqrt()[..., None, :]) @ V.mT
        for rows in row_chunks(Y):
            Y[..., rows, :] = (Y[..., rows, :].double() @ P).to(Y.dtype)
        if (smallest > 1e-6 * largest).all():
            break
    return Y


def defect(X: Tensor) -> Tensor:
    """‖XᵀX - I‖_F / √p in float64, (..., n, p) to (...): how far the columns are from orthonormal.

    For a DTensor sharded by rows: one all-reduce of p x p, the same result on every rank, no gradient.
    """
    if is_dtensor(X):
        X = X.detach()
    G = row_reduce(X)(gram_in_double(to_local(X)))
    return torch.linalg.matrix_norm(G - eye_like(G)) / X.shape[-1] ** 0.5


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
