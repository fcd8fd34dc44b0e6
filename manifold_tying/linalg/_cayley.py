"""Skew matrices and their Cayley maps."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from manifold_tying.autograd import custom_gradient, in_transform, save, saved
from manifold_tying.precision import check_int, check_square, compute_dtype, eye_like, full_precision

# Matrices of up to this many entries are mapped in float64: overhead dominates there, not arithmetic.
SMALL = 64 * 64
_LARGEST_KEPT = 1024  # b up to which the places of entries are kept, 9 bytes for each of b²
_kept: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
_LEAF = 128  # torch's batched LU of larger matrices may be wrong on several CPU threads, and is slow on a GPU


def cayley(A: Tensor) -> Tensor:
    """C = (I - A)⁻¹(I + A), orthogonal for skew A (..., b, b).

    Small or odd b are computed in float64: a skew A of odd size is singular, so the condition of I - A is ‖A‖. In float32 the
    defect is 1e-5 at ‖A‖₂ = 50 and grows with ‖A‖₂².
    """
    check_square(A)
    with full_precision(A.device):
        C: Tensor = _cayley(A)
        return C


def _shifted(A: Tensor) -> Tensor:
    """I - A in the dtype in which to invert it."""
    dtype, b = compute_dtype(A.dtype), A.shape[-1]
    W = A.to(torch.float64 if b % 2 or b * b <= SMALL else dtype)
    return eye_like(W) - W


class _Cayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        M = _inverse_by_halves(_shifted(A))
        save(ctx, (A,), M.to(compute_dtype(A.dtype)))
        return (2 * M - eye_like(M)).to(A.dtype)  # (I - A)⁻¹(I + A) = 2 (I - A)⁻¹ - I

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, (M,) = saved(ctx)
        with full_precision(grad.device):  # dM = M dA M; in A's dtype, also after a float64 inverse
            return (M.mT @ (2 * grad).to(M.dtype) @ M.mT).to(grad.dtype)


def _plain_cayley(A: Tensor) -> Tensor:
    M = inverse(_shifted(A))
    return (2 * M - eye_like(M)).to(A.dtype)


_cayley = custom_gradient(_Cayley, _plain_cayley)


def cayley_neumann(A: Tensor, terms: int = 2, *, matmul_dtype: torch.dtype | None = None) -> Tensor:
    """R = (I + A) Σ_{i=0..terms} Aⁱ, the Cayley map with a truncated Neumann series in place of the inverse.

    R = C (I - A^(terms+1)) with C the Cayley map, so ‖RᵀR - I‖ is about ‖A‖^(2 terms + 2) for an even number of terms and
    2‖A‖^(terms + 1) for an odd one: prefer even. The forward costs ``terms`` matmuls. With two terms the backward costs as
    many; its gradient is closed form and skew. (POET, section 3; A skew, (..., b, b), ‖A‖ < 1.)

    ``matmul_dtype``: dtype of the matmuls of two terms, forward and backward; None means A's dtype. Other numbers of terms
    ignore it. Only A² and A³ are in low precision; their error is ‖A‖ times that of rounding 2A.
    """
    dtype = compute_dtype(A.dtype)
    check_square(A)
    check_int("terms", terms, 1)
    with full_precision(A.device):
        W = A.to(dtype)
        if terms == 2:
            return _cayley_neumann_2(W, matmul_dtype or dtype).to(A.dtype)
        W, eye = W.reshape(-1, *W.shape[-2:]), eye_like(W)
        S = eye + W
        for _ in range(terms - 1):
            S = torch.baddbmm(eye, W, S)
        return torch.baddbmm(S, W, S).view(A.shape).to(A.dtype)


class _CayleyNeumann2(torch.autograd.Function):
    """R = I + 2A + 2A² + A³ for skew A."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, matmul_dtype: torch.dtype) -> Tensor:
        save(ctx, (A, matmul_dtype))
        return _cubic(A, matmul_dtype)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        # With Σ and K the symmetric and skew parts of R̄, and A skew, the skew part of Ā is
        # 2K - 2(AΣ + ΣA) + A²K + AKA + KA² = 2K + Z - Zᵀ with Z = A (AK + (AK)ᵀ/2 - 2Σ), since (AK)ᵀ = KA.
        (A, matmul_dtype), _ = saved(ctx)
        with full_precision(A.device):
            low = A.to(matmul_dtype)
            transposed = grad_R.mT.contiguous()
            twice_K = grad_R - transposed
            P = (low @ twice_K.to(matmul_dtype)).to(A.dtype)
            inner = torch.add(P, P.mT, alpha=0.5).sub_(grad_R, alpha=2).sub_(transposed, alpha=2)
            twice_Z = (low @ inner.to(matmul_dtype)).to(A.dtype)
            return twice_K.add_(twice_Z, alpha=0.5).sub_(twice_Z.mT, alpha=0.5), None


def _plain_cayley_neumann_2(A: Tensor, matmul_dtype: torch.dtype) -> Tensor:
    K = (A - A.mT) / 2
    return _cubic(K + (A - K).detach(), matmul_dtype)  # like the closed form: the gradient along skew matrices


_cayley_neumann_2 = custom_gradient(_CayleyNeumann2, _plain_cayley_neumann_2)


def _cubic(A: Tensor, matmul_dtype: torch.dtype) -> Tensor:
    """I + 2A + 2A² + A³ in A's dtype, with matmuls in ``matmul_dtype``."""
    low = A.to(matmul_dtype)
    A2 = low @ low
    half = A + A2
    half.diagonal(dim1=-2, dim2=-1).add_(0.5)
    # Not in place: compiled by torch 2.11, a Function whose forward returns a tensor that it modified in place silently
    # propagates a gradient of zeros.
    return torch.add(low @ A2, half, alpha=2)


def _inverse_by_halves(K: Tensor) -> Tensor:
    """K⁻¹ of K (..., b, b) with positive definite symmetric part, recursively by halves: matmuls replace most of an LU.

    Leading blocks and their Schur complements inherit that symmetric part, so no pivoting between blocks is needed. Rounding
    grows at worst with (‖K - Kᵀ‖/2)² over the smallest eigenvalue of the symmetric part (Golub and Van Loan 1979).
    """
    b = K.shape[-1]
    if b <= _LEAF:
        found: Tensor = torch.linalg.inv_ex(K)[0]
        return found
    half = b // 2
    M11 = _inverse_by_halves(K[..., :half, :half])
    right, left = M11 @ K[..., :half, half:], K[..., half:, :half] @ M11
    M22 = _inverse_by_halves(K[..., half:, half:] - K[..., half:, :half] @ right)
    M21 = -(M22 @ left)
    top = torch.cat([M11 - right @ M21, -(right @ M22)], -1)
    return torch.cat([top, torch.cat([M21, M22], -1)], -2)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, K: Tensor) -> Tensor:
        M = _inverse_by_halves(K)
        ctx.save_for_backward(M)
        return M

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        MT: Tensor = ctx.saved_tensors[0].mT
        return -(MT @ grad @ MT)


inverse = custom_gradient(_Inverse, _inverse_by_halves, differentiable=True)


def skew(vector: Tensor, b: int) -> Tensor:
    """Skew matrix (..., b, b) from its b(b-1)/2 entries above the diagonal, row by row."""
    if vector.shape[-1] != b * (b - 1) // 2:
        raise ValueError(f"expected {b * (b - 1) // 2} entries for b={b}, got {vector.shape[-1]}")
    if vector.numel() == 0:
        return vector.new_zeros(*vector.shape[:-1], b, b)
    source, sign = _places(vector, b)
    return (vector.index_select(-1, source) * sign).view(*vector.shape[:-1], b, b)


def _places(vector: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """For each entry of a skew matrix its place in the vector, and its sign."""
    device, is_cuda = vector.device, vector.is_cuda
    keeps = type(vector) in (Tensor, nn.Parameter) and b <= _LARGEST_KEPT
    keeps = keeps and not (torch.compiler.is_compiling() or in_transform())
    if keeps and (b, device) in _kept:
        return _kept[b, device]
    # Outside modes, which record operations: a checkpoint's second forward pass finds the places, and so must do as the first.
    with ExitStack() as outside, torch.inference_mode(False):
        if keeps:
            outside.enter_context(_disable_current_modes())
            outside.enter_context(torch._C.DisableTorchFunction())
        n = torch.arange(b, device=device)
        upper = (n * (2 * b - n - 3) // 2 - 1)[:, None] + n  # right above the diagonal
        source = torch.where(n > n[:, None], upper, upper.mT).clamp_(min=0).flatten()
        sign = (n - n[:, None]).sign().to(torch.int8).flatten()
    if keeps and not (is_cuda and torch.cuda.is_current_stream_capturing()):
        if is_cuda:  # other streams will read them
            torch.cuda.current_stream(device).synchronize()
        _kept[b, device] = source, sign
    return source, sign
