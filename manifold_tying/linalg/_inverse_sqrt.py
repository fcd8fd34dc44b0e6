"""G^(-1/2) of symmetric positive definite matrices by matmuls."""

import numpy as np
import torch
from torch import Tensor

from manifold_tying.precision import eye_like, sym

_SERIES = [1.0]  # of (1 + x)^(-1/2)
for _k in range(1, 9):
    _SERIES.append(_SERIES[-1] * (1 - 2 * _k) / (2 * _k))
# A polynomial near (1 + x)^(-1/2) for x from -0.97 to 0. It leaves |x| <= 0.3; two more rounds leave 1e-15.
_WIDE = (
    np.polynomial.Chebyshev.interpolate(lambda x: (1 + x) ** -0.5, 4, domain=(-0.97, 0.0))
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
# Rounds of corrections. Where they do not suffice, an eigendecomposition is faster, and more accurate.
_ROUNDS = 2


def inverse_sqrt_by_matmuls(G: Tensor, *, sync_free: bool = False) -> tuple[Tensor, bool] | None:
    """G^(-1/2) and whether the condition of G may exceed 3; None if it is too large, or G is not finite.

    P starts as a multiple of I. Each round multiplies it by I + S, a polynomial in E with P G P = I + E that approximates
    (I + E)^(-1/2).

    Args:
        G: (..., p, p), float32 or float64.
        sync_free: 14 matmuls without a sync or a branch on the data, for GPUs and compiled code. Sufficient for a condition of
            about 10. Beyond, the result is too small: G^(1/2) times it is symmetric with eigenvalues between 0 and 1.
    """
    eye, c, eps = eye_like(G), mean_eigenvalue(G), torch.finfo(G.dtype).eps
    E = G / c - eye
    S, size = (E, 1.0) if sync_free else series(E, eps)
    far = not size < 0.5
    if far:  # scale down to E between -I and 0
        E2 = E @ E
        shrink = 1 / (1 + torch.linalg.matrix_norm(E2 @ E2)[..., None, None] ** 0.25)
        c, E, size = c / shrink, shrink * E + (shrink - 1) * eye, 1.0
        E2 = E @ E
        k0, k1, k2, k3, k4 = _WIDE
        S = (k0 - 1) * eye + k1 * E + k2 * E2 + E2 @ (k3 * E + k4 * E2)
    Q = S  # P = (I + Q) / √c
    for _ in range(_ROUNDS):
        if converges(size, eps):
            break
        F = E + S + E @ S  # (I + S)(I + E)(I + S) - I, from deviations to avoid cancellation
        E = sym(F + S + S @ F)
        S, size = series(E, eps, sync_free)
        Q = Q + S + Q @ S
    return (sym(eye + Q) * c.rsqrt(), far) if sync_free or converges(size, eps) else None


def mean_eigenvalue(G: Tensor) -> Tensor:
    """tr G / p, (..., 1, 1), at least the smallest normal number."""
    return G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(G.dtype).tiny)


def series(E: Tensor, eps: float, sync_free: bool = False) -> tuple[Tensor, float]:
    """S = (I + E)^(-1/2) - I by its series to a precision of eps, and an upper bound on ‖E‖₂, of the largest in a batch.

    Has as many terms as the bound needs, up to E⁸; if that is too few, as with ``sync_free``, only those up to E⁴.
    """
    size = 1.0 if sync_free else _norm(E)
    if size < (2 * eps) ** 0.5:
        return -E / 2, size
    E2 = E @ E
    size = 1.0 if sync_free else _norm(E2) ** 0.5
    degree = next((k for k in (2, 4, 6, 8) if size < (4 * eps) ** (1 / (k + 1))), 4)
    S: Tensor | None = None
    for k in range(degree, 0, -2):
        part = torch.add(E2 * _SERIES[k], E, alpha=_SERIES[k - 1])
        S = part if S is None else part + E2 @ S
    assert S is not None
    return S, size


def converges(size: float, eps: float) -> bool:
    """Whether :func:`series` is as precise as eps for ‖E‖₂ <= size."""
    return size < (4 * eps) ** (1 / 9)


def _norm(A: Tensor) -> float:
    return float(torch.linalg.vector_norm(A) if A.ndim == 2 else torch.linalg.vector_norm(A, dim=(-2, -1)).amax())
