"""Skew matrices and their Cayley maps."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying.autograd import custom_gradient, in_transform, save, saved
from manifold_tying.linalg._inverse_sqrt import series
from manifold_tying.precision import check_int, check_square, compute_dtype, eye_like, full_precision, gram

# Matrices of up to this many entries are mapped in float64: overhead dominates there, not arithmetic.
_SMALL = 64 * 64
_LEAF = 128  # torch's batched LU of larger matrices may be wrong on several CPU threads, and is slow on a GPU


def cayley(A: Tensor) -> Tensor:
    """C = (I - A)⁻¹(I + A), orthogonal for skew A (..., b, b).

    Small or odd b are computed in float64: a skew A of odd size is singular, so the condition of I - A is ‖A‖. In float32 the
    defect is 1e-5 at ‖A‖₂ = 50 and grows with ‖A‖₂².
    """
    check_square(A)
    with full_precision(A.device):
        M = _inverse(_shifted(A))
        return (2 * M - eye_like(M)).to(A.dtype)  # (I - A)⁻¹(I + A) = 2 (I - A)⁻¹ - I


def _shifted(A: Tensor) -> Tensor:
    """I - A in the dtype in which to invert it."""
    dtype, b = compute_dtype(A.dtype), A.shape[-1]
    W = A.to(torch.float64 if b % 2 or b * b <= _SMALL else dtype)
    return eye_like(W) - W


class _SkewCayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor, b: int) -> Tensor:
        with full_precision(vector.device):
            M = _inverse_by_halves(_shifted(skew(vector, b)))
            save(ctx, (vector, b), M.to(vector.dtype))
            return (2 * M - eye_like(M)).to(vector.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, (M,) = saved(ctx)
        with full_precision(grad.device):  # with C = 2M - I and dM = M dA M
            G = M.mT @ grad @ M.mT
            return unskew(G - G.mT).mul_(2), None


def _plain_skew_cayley(vector: Tensor, b: int) -> Tensor:
    return cayley(skew(vector, b))


_skew_cayley = custom_gradient(_SkewCayley, _plain_skew_cayley)


def skew_cayley(vector: Tensor, b: int) -> Tensor:
    """``cayley(skew(vector, b))``, (..., b(b-1)/2) to (..., b, b), with a gradient in two products."""
    C: Tensor = _skew_cayley(vector, b)
    return C


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
        eye = eye_like(W)
        S = eye + W
        for _ in range(terms - 1):
            S = eye + W @ S
        return (S + W @ S).to(A.dtype)


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


def cayley_at(base: Tensor, Y: Tensor, terms: int | None = None) -> Tensor:
    """The Cayley map around a base B with orthonormal columns: B for Y = 0, orthonormal columns for every Y, (..., n, p).

    Square: X = B (I - A)⁻¹(I + A) with A = tril(Y, -1) - tril(Y, -1)ᵀ. Tall: X = (I - A)⁻¹(I + A) B with
    A = (Z Bᵀ - B Zᵀ + B K Bᵀ)/2, K the skew part of BᵀY and Z = Y - B BᵀY, which is the curve of the Cayley retraction
    along the tangent part of Y. There A maps B a + Z b to B (K a - ZᵀZ b)/2 + Z a/2, so all but six products are p x p, and
    X = (2B + Z) M - B with M = (I + ZᵀZ/4 - K/2)⁻¹. ZᵀZ squares the condition of Z, so the tall X is re-orthonormalized:
    its columns are orthonormal to rounding for ‖Y‖₂ up to about 1e3 in float32. The square X is not: its defect is 1e-5 at
    ‖A‖₂ = 50 and grows with ‖A‖₂². Small matrices are mapped in float64.

    ``terms`` replaces the inverse by that many terms of its Neumann series, see :func:`cayley_neumann`. Differentiable with
    respect to Y; base is a constant.
    """
    if base.dtype.itemsize < 4:
        return cayley_at(base.float(), Y.float(), terms).to(base.dtype)
    if base.dtype == torch.float32 and base.shape[-2] * base.shape[-1] <= _SMALL:
        return cayley_at(base.double(), Y.double(), terms).to(base.dtype)
    with full_precision(base.device):
        if base.shape[-1] == base.shape[-2]:
            if terms is None:
                return _square_cayley(base, Y)
            return base @ cayley_neumann(_skew_of_lower(Y), terms)
        if terms is None:
            return _tall_cayley(base, Y)
        return cayley_curve(base, Y, terms)


def cayley_curve(base: Tensor, Y: Tensor, terms: int | None = None) -> Tensor:
    """(I - A)⁻¹(I + A) B with the A of a tall B in :func:`cayley_at`, here for a square B as well.

    Differentiable with respect to both. The inverse is taken in float64, so that Z may be long.
    """
    S = base.mT @ Y
    Z = Y - base @ S
    K = (S - S.mT) / 2
    if terms is None:
        wide = Z.double()  # ZᵀZ squares the condition of Z
        eye = eye_like(wide)
        M = _inverse(eye + wide.mT @ wide / 4 - K.double() / 2)
        return base + (Z @ M.to(Z.dtype) + base @ (2 * (M - eye)).to(Z.dtype))
    T, eye = gram(Z), eye_like(S)
    # (I + A) Σ Aⁱ B = B + 2(A + ... + A^terms) B + A^(terms+1) B with Aⁱ B = B a + Z b.
    a, b = K / 2, eye / 2
    of_base, of_Z = eye + 2 * a, 2 * b
    for last in range(1, terms + 1):
        a, b = (K @ a - T @ b) / 2, a / 2
        weight = 1 if last == terms else 2
        of_base, of_Z = of_base + weight * a, of_Z + weight * b
    return base @ of_base + Z @ of_Z


class _SquareCayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, Y: Tensor) -> Tensor:
        X, M = _square_cayley_and_inverse(base, Y)
        save(ctx, (base, Y), M, X)
        return X

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor) -> tuple[None, Tensor]:
        # dX = 2 B M dA M, so Ā = 2 (BM)ᵀ X̄ Mᵀ, and 2 BM = X + B.
        (base, _), (M, X) = saved(ctx)
        with full_precision(M.device):
            grad_A = ((X + base).mT @ grad_X) @ M.mT
            return None, (grad_A - grad_A.mT.contiguous()).tril(-1)


def _square_cayley_and_inverse(base: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """X = B (I - A)⁻¹(I + A) and M = (I - A)⁻¹."""
    eye = eye_like(Y)
    M = _inverse(eye - _skew_of_lower(Y))
    return base @ (2 * M - eye), M  # (I - A)⁻¹(I + A) = 2M - I


_square_cayley = custom_gradient(_SquareCayley, lambda base, Y: _square_cayley_and_inverse(base.detach(), Y)[0])


class _TallCayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, Y: Tensor) -> Tensor:
        X, Z, M = _tall_cayley_and_parts(base, Y)
        save(ctx, (base, Y), Z, M, X)
        return X

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor) -> tuple[None, Tensor]:
        # N is the gradient with respect to M⁻¹. (2B + Z) M = X + B saves the product with Z, and BᵀZ̄ = BᵀX̄ Mᵀ.
        (base, _), (Z, M, X) = saved(ctx)
        with full_precision(M.device):
            from_base = base.mT @ grad_X
            N = -((X.mT @ grad_X + from_base) @ M.mT)
            grad_Z = grad_X @ M.mT + Z @ ((N + N.mT) / 4)
            return None, grad_Z + base @ ((N.mT - N) / 4 - from_base @ M.mT)


def _tall_cayley_and_parts(base: Tensor, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X, Z and M of :func:`cayley_at`."""
    S = base.mT @ Y
    Z = Y - base @ S
    M = _inverse(eye_like(S) + gram(Z) / 4 - (S - S.mT) / 4)
    return _reorthonormalized(torch.add(Z, base, alpha=2) @ M - base), Z, M


_tall_cayley = custom_gradient(_TallCayley, lambda base, Y: _tall_cayley_and_parts(base.detach(), Y)[0])


def _reorthonormalized(X: Tensor) -> Tensor:
    """X (XᵀX)^(-1/2) by its series: reduces ‖XᵀX - I‖₂ = 0.1 to 1e-6."""
    G = gram(X)
    S, _ = series(G - eye_like(G), torch.finfo(G.dtype).eps, sync_free=True)
    return X + X @ S


def _inverse_by_halves(K: Tensor) -> Tensor:
    """K⁻¹ of K (..., b, b) with positive definite symmetric part, recursively by halves: matmuls replace most of an LU.

    Leading blocks and their Schur complements inherit that symmetric part, so no pivoting between blocks is needed. Rounding
    grows at worst with (‖K - Kᵀ‖/2)² over the smallest eigenvalue of the symmetric part (Golub and Van Loan 1979).
    """
    b = K.shape[-1]
    if b <= _LEAF:
        inverse: Tensor = torch.linalg.inv_ex(K)[0]
        return inverse
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


_inverse = custom_gradient(_Inverse, _inverse_by_halves, differentiable=True)


def _skew_of_lower(Y: Tensor) -> Tensor:
    """tril(Y, -1) - tril(Y, -1)ᵀ; copying the transpose first halves the time of the subtraction."""
    lower = Y.tril(-1)
    return lower - lower.mT.contiguous()


def skew(vector: Tensor, b: int) -> Tensor:
    """Skew matrix (..., b, b) from its b(b-1)/2 entries above the diagonal, row by row; inverse of :func:`unskew`."""
    if vector.shape[-1] != b * (b - 1) // 2:
        raise ValueError(f"expected {b * (b - 1) // 2} entries for b={b}, got {vector.shape[-1]}")
    if vector.numel() == 0:
        return vector.new_zeros(*vector.shape[:-1], b, b)
    rows, columns = torch.triu_indices(b, b, offset=1, device=vector.device)
    upper = vector.new_zeros(*vector.shape[:-1], b * b)
    order = rows * b + columns
    if in_transform():  # vmap has no rule for index_copy_
        upper = upper.scatter(-1, order.expand(vector.shape), vector)
    else:
        upper.index_copy_(-1, order, vector)  # 3x faster than upper[..., rows, columns] = vector
    square: Tensor = upper.unflatten(-1, (b, b))
    return square - square.mT


def unskew(A: Tensor) -> Tensor:
    """The b(b-1)/2 entries of (..., b, b) above the diagonal, row by row."""
    check_square(A)
    b = A.shape[-1]
    rows, columns = torch.triu_indices(b, b, offset=1, device=A.device)
    return A.flatten(-2).index_select(-1, rows * b + columns)
