"""The polar factor of nearly orthonormal matrices in place, the last part of every retraction; how far they are from it."""

import torch
from torch import Tensor

from manifold_tying.distributed import Reduce, full_tensor, is_dtensor, no_reduce, row_reduce, to_local
from manifold_tying.linalg._inverse_sqrt import inverse_sqrt_without_sync, near_inverse_sqrt, series
from manifold_tying.linalg._polar import polar
from manifold_tying.precision import compute_dtype, eye_like, full_precision, gram, gram_in_double, row_chunks

# On a CPU, matrices of at most this many entries take less time in float64 with few operations.
_SMALL = 2**13
# Of products by a polynomial in YᵀY. Where they do not suffice, an eigendecomposition is faster, and more accurate.
_ROUNDS = 4


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
        sync_free: a fixed number of matmuls, without a sync and without a fallback; always on in compiled code.
        skip: with ``sync_free``, 0 or 1 on Y's device; with 1, Y stays unchanged.
    """
    sync_free = sync_free or torch.compiler.is_compiling()
    if Y.numel() == 0 and reduce is no_reduce:  # no matrices, so no collective either
        return Y
    if (
        Y.dtype == torch.float32
        and Y.device.type == "cpu"
        and Y.ndim <= 3
        and Y.numel() <= _SMALL
        and reduce is no_reduce
        and not sync_free
    ):
        Z, eps = Y.double(), torch.finfo(Y.dtype).eps
        add = torch.addmm if Y.ndim == 2 else torch.baddbmm
        # ZᵀZ = c (I + E): a long step mostly adds a multiple of I, so E stays small.
        c = float(torch.linalg.vector_norm(Z)) ** 2 * Z.shape[-2] / Z.numel() or 1.0
        S, size = series(add(eye_like(Z), Z.mT, Z, beta=-1, alpha=1 / c), eps)
        if size < (4 * eps) ** (1 / 9):  # then the series is as precise as eps
            return Y.copy_(add(Z, Z, S, beta=c**-0.5, alpha=c**-0.5))
    with full_precision(Y.device):
        if sync_free:
            return _multiply_rows_(Y, Y, *inverse_sqrt_without_sync(reduce(gram(Y)), skip))
        Z = Y
        for _ in range(_ROUNDS):
            D, r, precise = near_inverse_sqrt(reduce(gram(Z)))
            if precise:
                return _multiply_rows_(Y, Z, D, r)
            Z = torch.addcmul(Z @ D, Z, r)
        return Y.copy_(polar(Y)[0]) if reduce is no_reduce else orthonormalize_rows_(Y, reduce)


def _multiply_rows_(Y: Tensor, Z: Tensor, D: Tensor, r: Tensor) -> Tensor:
    """Y <- Z (r I + D) in place for Y, Z (..., n, p), D (..., p, p) and r (..., 1, 1), one block of rows at a time."""
    for rows in row_chunks(Y):  # the sum rounds less than the product with r I + D where sums are sequential
        part = Z[..., rows, :]
        torch.addcmul(part @ D, part, r, out=Y[..., rows, :])
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
    """‖XᵀX - I‖_F / √p in float64, (..., n, p) to (...): how far the columns are from orthonormal, or the rows of a wide X.

    For a DTensor sharded by rows: one all-reduce of p x p, the same result on every rank, no gradient.
    """
    if is_dtensor(X):
        X = X.detach()
    if X.shape[-2] < X.shape[-1]:
        X = full_tensor(X).mT
    G = row_reduce(X)(gram_in_double(to_local(X)))
    distance: Tensor = torch.linalg.matrix_norm(G - eye_like(G)) / max(1, X.shape[-1]) ** 0.5
    return distance
