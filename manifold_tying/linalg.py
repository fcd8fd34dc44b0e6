"""Pure tensor functions behind everything else: products of d x d Gram matrices instead of factorizations of V x d.

Leading dimensions are batch dimensions. float32 and float64 are computed as they are, bfloat16 and float16 in float32 and
cast back; autocast and TF32 are off inside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Orthonormalization = Literal["polar", "qr", "cholesky-qr"]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products in float32: autocast and TF32 (or its bfloat16 relative on CPUs) off inside."""
    with torch.autocast(device.type, enabled=False):
        # Compiled code takes the setting that was in force when it was traced; it cannot be switched inside a graph.
        if torch.compiler.is_compiling() or torch.get_float32_matmul_precision() == "highest":
            yield
            return
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other floating dtype; ValueError for the rest."""
    if not dtype.is_floating_point:
        raise ValueError(f"expected a real floating dtype, got {dtype}; convert the tensor with .float()")
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tall(Y: Tensor, what: str = "matrix") -> None:
    """ValueError unless Y is floating with shape (..., n, p), n >= p >= 1."""
    working_dtype(Y.dtype)
    if Y.ndim < 2 or Y.shape[-1] < 1 or Y.shape[-2] < Y.shape[-1]:
        raise ValueError(
            f"expected a {what} of shape (..., n, p) with n >= p >= 1, got {tuple(Y.shape)}; transpose it?"
        )


def gram(Y: Tensor) -> Tensor:
    """YᵀY, (..., n, p) to (..., p, p)."""
    if Y.shape[-1] < 16 and Y.dtype == torch.float32:
        # CPU kernels for narrow matrices add rows up one by one: relative errors of 4e-5 with 200000 of them.
        wide = Y.double()
        return (wide.mT @ wide).to(Y.dtype)
    return Y.mT @ Y


def symmetric(A: Tensor) -> Tensor:
    """(A + Aᵀ)/2."""
    return (A + A.mT) / 2


def identity_like(A: Tensor) -> Tensor:
    """The identity with the last dimension, dtype and device of A, shape (p, p)."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def defect(X: Tensor) -> Tensor:
    """‖XᵀX - I‖_F / √p in float64, (..., n, p) to (...): how far the columns are from orthonormal."""
    G = gram(X.double())
    return torch.linalg.matrix_norm(G - identity_like(G)) / X.shape[-1] ** 0.5


def polar(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Thin polar factors Y = U H: U with orthonormal columns is the nearest such matrix to Y, H is symmetric and >= 0.

    Args:
        Y: (..., n, p), n >= p.

    Returns:
        U (..., n, p) and H (..., p, p), contiguous, in Y's dtype.

    Computed from the p x p Gram matrix, through a float64 SVD where Y is too ill-conditioned for that (about 50 in float32).
    Where Y is rank-deficient, H is unique, U one of many. The gradient is closed form in the eigenbasis of H, once
    differentiable; it divides by h_i + h_j only, so equal singular values are harmless. Raises ValueError for a wide,
    non-floating, NaN or infinite Y. (PIT, equation 7.)
    """
    check_tall(Y)
    with full_precision(Y.device):
        U, H = _Polar.apply(Y.to(working_dtype(Y.dtype)))
    return U.to(Y.dtype), H.to(Y.dtype)


def orthonormalize(Y: Tensor, method: Orthonormalization = "polar") -> Tensor:
    """Orthonormal columns that span the columns of Y (..., n, p), n >= p.

    "polar" is the nearest such matrix; "qr" is the Q of Householder QR with R's diagonal > 0; "cholesky-qr" is the same Q by
    two Cholesky factorizations of Gram matrices, falling back to Householder where those break down (condition about 1e3 in
    float32). All are differentiable once in closed form.
    """
    check_tall(Y)
    if method not in get_args(Orthonormalization):
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(get_args(Orthonormalization))}")
    if method == "polar":
        return polar(Y)[0]
    with full_precision(Y.device):
        return _QR.apply(Y.to(working_dtype(Y.dtype)), method == "cholesky-qr").to(Y.dtype)


def inverse_sqrt(G: Tensor) -> Tensor:
    """G^(-1/2) of symmetric positive definite G (..., p, p) by products alone, for G of condition up to about 1e6.

    Coupled Newton-Schulz iteration on G/c with c >= the largest eigenvalue, then one step of refinement in float64, since
    float32 alone leaves a residual of some 2e-6. Falls back to a float64 eigendecomposition where that does not converge,
    and in float32 for conditions above about 1e4, where a refinement would do harm.
    """
    eye = identity_like(G)
    # min(infinity norm, Frobenius norm) bounds the spectral norm, so all eigenvalues of G/c are in (0, 1].
    c = torch.minimum(G.abs().sum(-1).amax(-1), torch.linalg.matrix_norm(G))[..., None, None].clamp_min(1e-30)
    Y, P = G / c, eye.expand_as(G)
    tolerance = 1e-4 if G.dtype == torch.float32 else 1e-6  # the refinement squares what is left
    for _ in range(40):
        R = eye - P @ Y
        if not (size := torch.linalg.matrix_norm(R).amax()) > tolerance:  # also leaves when it is NaN
            break
        Q = eye + R / 2
        Y, P = Y @ Q, Q @ P
    if not size <= tolerance:
        return _inverse_sqrt_eigh(G)
    wide = symmetric(P.double()) / c.double().sqrt()
    for _ in range(1 if G.dtype == torch.float32 else 2):
        error = identity_like(wide) - wide @ G.double() @ wide
        # A refinement step multiplies the part of the error that does not commute with G by √cond(G)/4.
        if not torch.linalg.matrix_norm(error).amax() < 1e-3:
            return _inverse_sqrt_eigh(G)
        wide = wide + wide @ error / 2
    return symmetric(wide).to(G.dtype)


def _inverse_sqrt_eigh(G: Tensor) -> Tensor:
    _check_finite(G)
    eigenvalues, V = torch.linalg.eigh(G.double())
    floor = eigenvalues[..., -1:] * 1e-15
    return ((V * eigenvalues.clamp_min(floor).rsqrt()[..., None, :]) @ V.mT).to(G.dtype)


def reorthonormalize(Y: Tensor) -> Tensor:
    """Polar factor Y (YᵀY)^(-1/2) by products alone, for Y (..., n, p) whose singular values are at least about 1.

    That is every retraction's case: a tangent step makes YᵀY = I + UᵀU >= I. Not differentiable; falls back to
    :func:`polar` after steps so large that float32 cannot resolve YᵀY.
    """
    with full_precision(Y.device):
        W = Y.to(working_dtype(Y.dtype))
        G = gram(W)
        largest = torch.linalg.matrix_norm(G, ord=float("inf")).amax()
        if not largest < 1e3:
            return polar(W)[0].to(Y.dtype)
        X = W @ inverse_sqrt(G)
        if largest > 4:  # rounding of G^(-1/2) grows with the condition of G
            X = X @ (1.5 * identity_like(G) - 0.5 * gram(X))
        return X.to(Y.dtype)


def cayley(A: Tensor) -> Tensor:
    """C = (I - A)⁻¹(I + A), orthogonal for skew A (..., b, b)."""
    dtype = working_dtype(A.dtype)
    _check_square(A)
    with full_precision(A.device):
        W = A.to(dtype)
        eye = identity_like(W)
        return torch.linalg.solve(eye - W, eye + W).to(A.dtype)


def cayley_neumann(A: Tensor, terms: int = 2) -> Tensor:
    """R = (I + A) Σ_{i=0..terms} Aⁱ, the Cayley map with its inverse replaced by a truncated Neumann series.

    R = C (I - A^(terms+1)) with C the Cayley map, so ‖RᵀR - I‖ is about ‖A‖^(2 terms + 2) for an even number of terms and
    2‖A‖^(terms + 1) for an odd one: prefer even. Costs ``terms`` products. (POET, section 3; A skew, (..., b, b), ‖A‖ < 1.)
    """
    dtype = working_dtype(A.dtype)
    _check_square(A)
    if not isinstance(terms, int) or terms < 1:
        raise ValueError(f"expected terms to be a whole number >= 1, got {terms!r}")
    with full_precision(A.device):
        W = A.to(dtype)
        eye = identity_like(W)
        S = eye + W
        for _ in range(terms - 1):
            S = eye + W @ S
        return (S + W @ S).to(A.dtype)


def skew(vector: Tensor, b: int) -> Tensor:
    """Skew matrix (..., b, b) from its b(b-1)/2 entries above the diagonal, row by row; inverse of :func:`unskew`."""
    if vector.shape[-1] != b * (b - 1) // 2:
        raise ValueError(f"expected {b * (b - 1) // 2} entries for b={b}, got {vector.shape[-1]}")
    rows, columns = torch.triu_indices(b, b, offset=1, device=vector.device)
    upper = vector.new_zeros(*vector.shape[:-1], b, b)
    upper[..., rows, columns] = vector
    return upper - upper.mT


def unskew(A: Tensor) -> Tensor:
    """The b(b-1)/2 entries of (..., b, b) above the diagonal, row by row."""
    _check_square(A)
    rows, columns = torch.triu_indices(A.shape[-1], A.shape[-1], offset=1, device=A.device)
    return A[..., rows, columns]


def _check_square(A: Tensor) -> None:
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"expected a square matrix (..., b, b), got {tuple(A.shape)}")


def _check_finite(Y: Tensor) -> None:
    if not torch.isfinite(Y).all():
        raise ValueError("expected a finite matrix, got NaN or Inf in it")


def _polar_svd(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, V, h of the polar factors in float64, whatever the conditioning."""
    _check_finite(Y)
    scale = Y.abs().amax((-2, -1), keepdim=True).double().clamp_min(1e-300)
    Q, R = torch.linalg.qr(Y.double() / scale)
    W, h, Vh = torch.linalg.svd(R)
    return ((Q @ W) @ Vh).to(Y.dtype), Vh.mT, h * scale[..., 0]


def _polar_eigh(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., n, p), V (..., p, p) and h (..., p) with Y = U H, H = V diag(h) Vᵀ; V and h in float64."""
    G = gram(Y)
    finite = bool(torch.isfinite(G).all())
    if finite:
        eigenvalues, V = torch.linalg.eigh(G.double())
        # A Gram matrix loses eigenvalues below eps times the largest; at √eps one polishing step still restores U. Below
        # the smallest normal number it loses digits whatever the conditioning.
        type_info = torch.finfo(Y.dtype)
        threshold = (type_info.eps**0.5 * eigenvalues[..., -1]).clamp_min(type_info.tiny / type_info.eps)
        finite = bool((eigenvalues[..., 0] > threshold).all())
    if not finite:
        return _polar_svd(Y)
    h = eigenvalues.sqrt()
    U = Y @ ((V / h[..., None, :]) @ V.mT).to(Y.dtype)
    return U @ (1.5 * identity_like(G) - 0.5 * gram(U)), V, h


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> tuple[Tensor, Tensor]:
        U, V, h = _polar_eigh(Y)
        ctx.save_for_backward(U, V, h)
        return U.contiguous(), symmetric((V * h[..., None, :]) @ V.mT).to(Y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_U: Tensor, grad_H: Tensor) -> Tensor:
        # With dY = U A + U⊥ B: dU = U Ω + U⊥ B H⁻¹, ΩH + HΩ = A - Aᵀ, and H dH + dH H = H A + AᵀH. In H's eigenbasis both
        # Sylvester equations are a division by h_i + h_j.
        U, V, h = ctx.saved_tensors
        floor = h.amax(-1, keepdim=True).clamp_min(1e-300) * 1e-14
        h = torch.maximum(h, floor)
        with full_precision(U.device):
            M = U.mT @ grad_U
            skew_part = V.mT @ (M - M.mT).double() @ V
            symmetric_part = V.mT @ symmetric(grad_H).double() @ V
            X = (skew_part + 2 * h[..., :, None] * symmetric_part) / (h[..., :, None] + h[..., None, :])
            inverse = (V / h[..., None, :]) @ V.mT
            # Both terms that U multiplies go into one product.
            inside = (V @ X @ V.mT - M.double() @ inverse).to(U.dtype)
            return U @ inside + grad_U @ inverse.to(U.dtype)


def _cholesky_qr(Y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Q, R by Cholesky-QR twice, or None where Y is too ill-conditioned for it."""
    L, info = torch.linalg.cholesky_ex(gram(Y))
    if info.any() or not torch.isfinite(L).all():
        return None
    Q = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    G = gram(Q)
    if not torch.linalg.matrix_norm(G - identity_like(G)).amax() < 0.1:
        return None
    L2 = torch.linalg.cholesky(G)
    return torch.linalg.solve_triangular(L2.mT, Q, upper=True, left=False), (L @ L2).mT


class _QR(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor, by_cholesky: bool) -> Tensor:
        factors = _cholesky_qr(Y) if by_cholesky else None
        if factors is None:
            _check_finite(Y)
            Q, R = torch.linalg.qr(Y)
            sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Y.dtype)
            factors = Q * sign[..., None, :], R * sign[..., :, None]
        Q, R = (factor.contiguous() for factor in factors)
        ctx.save_for_backward(Q, R)
        return Q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Q: Tensor) -> tuple[Tensor, None]:
        # Ȳ = (Q̄ + Q copyltu(-Q̄ᵀQ)) R⁻ᵀ with copyltu(M) = tril(M) + tril(M, -1)ᵀ.
        Q, R = ctx.saved_tensors
        with full_precision(Q.device):
            M = -(grad_Q.mT @ Q)
            inside = grad_Q + Q @ (M.tril() + M.tril(-1).mT)
            return torch.linalg.solve_triangular(R.mT, inside, upper=False, left=False), None
