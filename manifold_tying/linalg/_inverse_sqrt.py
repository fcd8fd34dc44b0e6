"""G^(-1/2) of symmetric positive definite matrices by matmuls, and their logarithm."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifold_tying.autograd import is_tracing
from manifold_tying.precision import add_symmetric_product_, eye_like, full_precision

_SERIES = [1.0]  # of (1 + x)^(-1/2)
for _k in range(1, 9):
    _SERIES.append(_SERIES[-1] * (1 - 2 * _k) / (2 * _k))
_DEGREE, _CONDITION = 8, 24  # of the widest polynomial, and of the matrices for which it is good to a few percent
_STEPS = range(-44, 69)  # radii 2^(k/4) for which the polynomials without a sync are prepared


def inverse_sqrt_by_matmuls(G: Tensor) -> tuple[Tensor, bool] | None:
    """G^(-1/2) and whether the condition of G may exceed 2; None if it is too large, or G is not finite. G (..., p, p)."""
    D, r, precise = near_inverse_sqrt(G)
    if precise:
        return D + r * eye_like(G), False
    E, c = _deviation(G)
    D = D.view_as(E) * c.sqrt()
    for _ in range(2):
        D, M = _corrected(D, E)
        if _norm(M) < (2 * torch.finfo(G.dtype).eps) ** 0.25:
            return ((eye_like(G) + D) * c.rsqrt()).view(G.shape), True
    return None


def inverse_sqrt_without_sync(G: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """D (..., p, p) and r (..., 1, 1) with G^(-1/2) = r I + D: no branch on the data, for GPUs and compiled code.

    By 10 matmuls, 15 in float64. Sufficient for a condition of 10. Beyond about 20 the result is too small: G^(1/2) times it is
    symmetric with eigenvalues between 0 and 1. With ``skip``, 0 or 1 on G's device, it is I where that is 1.
    """
    E, c = _deviation(G)
    E2 = E @ E
    size, (bounds, rows) = torch.linalg.vector_norm(E2 @ E2, dim=(-2, -1)), _prepared(G)  # at least r⁴
    D = _polynomial(E, E2, rows[torch.bucketize(size, bounds)])
    for _ in range(1 if G.dtype == torch.float32 else 2):
        D, _ = _corrected(D, E)
    r = c.rsqrt().view(*G.shape[:-2], 1, 1)
    kept = r if skip is None else r.addcmul(r, skip, value=-1)
    return D.view(G.shape).mul_(kept), kept if skip is None else kept + skip


def near_inverse_sqrt(G: Tensor) -> tuple[Tensor, Tensor, bool]:
    """D (..., p, p), r (..., 1, 1), and whether r I + D is G^(-1/2) to rounding; else it is near to it up to a condition of 24.

    At most four products, fewer if the eigenvalues of G differ little.
    """
    (E, c), eps = _deviation(G), torch.finfo(G.dtype).eps
    _prepared(G)  # a CUDA graph that is captured next cannot copy it to the device
    r = c.rsqrt().view(*G.shape[:-2], 1, 1)
    if _norm(E) < (2 * eps) ** 0.5:
        return E.view(G.shape) * (-0.5 * r), r, True
    E2 = add_symmetric_product_(torch.empty_like(E), E, E, beta=0)
    radius = _radius(E2)
    degree = next((k for k in range(2, _DEGREE + 1, 2) if radius < 2 * (2 * eps) ** (1 / (k + 1))), None)
    step = int(np.ceil(4 * np.log2(radius))) if radius < 2 ** (_STEPS[-1] / 4) else _STEPS[-1]
    rows = torch.tensor(_coefficients(step, degree or _DEGREE), dtype=G.dtype, device=G.device)
    return _polynomial(E, E2, rows[None]).view(G.shape) * r, r, degree is not None


def _deviation(G: Tensor) -> tuple[Tensor, Tensor]:
    """E (m, p, p) and c (m, 1, 1), the mean eigenvalue or the smallest normal number, so that G (..., p, p) is c (I + E)."""
    H = G.reshape(-1, *G.shape[-2:])
    c = H.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(G.dtype).tiny)
    E = H / c
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    return E, c


def _corrected(D: Tensor, E: Tensor) -> tuple[Tensor, Tensor]:
    """For P = I + D and G = I + E (m, p, p): P (I + M)^(-1/2) - I by the series up to M³, never too large, and M = P G P - I.

    From deviations: a GPU adds the entries of a product one by one, and would round each sum to the precision of 1.
    """
    F = (D + E).baddbmm_(D, E)  # P G - I
    M = (F + D).baddbmm_(F, D)
    S = torch.baddbmm(M, M, torch.baddbmm(M, M, M, beta=0.375, alpha=-0.3125), beta=-0.5)
    return (D + S).baddbmm_(D, S), M


def _polynomial(E: Tensor, E2: Tensor, rows: Tensor) -> Tensor:
    """The polynomial of :func:`_coefficients` in E (m, p, p) and its square."""
    parts = rows[..., 1, None, None] * E[:, None]
    parts.addcmul_(rows[..., 2, None, None], E2[:, None])
    parts.diagonal(dim1=-2, dim2=-1).add_(rows[..., :1])
    *lower, P, T2 = parts.unbind(1)
    for part in reversed(lower):
        P = add_symmetric_product_(part, P, T2)
    return P


@lru_cache(maxsize=256)
def _coefficients(step: int, degree: int) -> list[list[float]]:
    """(1 + E)^(-1/2) - 1 for eigenvalues of E up to r = 2^(step/4) in size, by a truncated Chebyshev series.

    In T, which is E shifted and scaled to [-1, 1], as b₀ + T² (b₁ + T² (b₂ + ...)): bᵢ is linear, the last one quadratic. Each
    row has the coefficients of 1, E and E² in one bᵢ; the last row those of T².
    """
    highest = 1 + 2 ** (step / 4)
    lowest = max(2 - highest, highest / _CONDITION)
    middle, half = (highest + lowest) / 2, (highest - lowest) / 2
    chebyshev: Any = np.polynomial.chebyshev
    a = chebyshev.cheb2poly(chebyshev.chebinterpolate(lambda t: (middle + half * t) ** -0.5 - 1, 63)[: degree + 1])
    shift = 1 - middle
    T, T2 = np.array([shift, 1, 0]) / half, np.array([shift**2, 2 * shift, 1]) / half**2
    rows = [np.array([a[k], 0, 0]) + a[k + 1] * T for k in range(0, degree, 2)]
    rows[-1] += a[degree] * T2
    return [row.tolist() for row in (*rows, T2)]


_BOUNDS, _ROWS = [2.0**step for step in _STEPS[:-1]], [_coefficients(step, _DEGREE) for step in _STEPS]
_PREPARED: dict[Any, tuple[Tensor, Tensor]] = {}


def _prepared(G: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of r⁴ and the rows of coefficients between them, like G; copied to a device once."""
    key: Any = (G.dtype, G.device, getattr(G, "fake_mode", None))
    if not (compiled := torch.compiler.is_compiling()) and key in _PREPARED:
        return _PREPARED[key]
    on_host = (torch.tensor(values, dtype=G.dtype) for values in (_BOUNDS, _ROWS))
    bounds, rows = (values.to(G.device, non_blocking=True) for values in on_host)
    if not compiled:
        _PREPARED[key] = bounds, rows
    return bounds, rows


def _radius(E2: Tensor) -> float:
    """The largest |eigenvalue| of E in a batch from E2 = E² (m, p, p): its upper bound √‖E²‖, or less by power iterations."""
    p, square, tiny = E2.shape[-1], torch.linalg.vector_norm(E2, dim=(-2, -1)), torch.finfo(E2.dtype).tiny
    if p > 32:
        A, v = E2 / square.add(tiny)[:, None, None], torch.arange(p, dtype=E2.dtype, device=E2.device).square_().cos_()
        v = A @ (A @ (A @ v[:, None]))
        growth = torch.linalg.vector_norm(A @ v, dim=(-2, -1)) / torch.linalg.vector_norm(v, dim=(-2, -1)).add_(tiny)
        square = square * (1.32 * growth).clamp_(max=1)
    return float(square.amax().sqrt())


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


def _norm(A: Tensor) -> float:
    return float(torch.linalg.vector_norm(A) if A.ndim == 2 else torch.linalg.vector_norm(A, dim=(-2, -1)).amax())


def spd_log(W: Tensor) -> Tensor:
    """log W of symmetric positive definite W (..., d, d), symmetric. Three times differentiable, for all eigenvalues.

    The gradient of an eigendecomposition divides by differences of eigenvalues. Here X solves exp X = W by Newton steps whose
    Jacobian, that of exp at log W, is a constant: they leave X as it is, and each makes one more derivative right.
    """
    with full_precision(W.device):
        eigenvalues, V = torch.linalg.eigh(W.detach())
        x = eigenvalues.log()
        X: Tensor = (V * x[..., None, :]) @ V.mT
        half, mean = ((x[..., :, None] + sign * x[..., None, :]) / 2 for sign in (-1, 1))
        # Daleckii and Krein: (exp a - exp b) / (a - b) = exp((a + b)/2) sinh(h) / h with h = (a - b)/2
        inverse = torch.where(half == 0, 1, half / half.sinh()) * (-mean).exp()
        for _ in range(3 if is_tracing() else 0):
            off = W - torch.linalg.matrix_exp(X)
            X = X + V @ (inverse * (V.mT @ (off - off.detach()) @ V)) @ V.mT
        return X
