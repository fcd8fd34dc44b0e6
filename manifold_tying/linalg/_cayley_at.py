"""Cayley maps around a base with orthonormal columns."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying.autograd import custom_gradient, save, saved
from manifold_tying.linalg._cayley import SMALL, cayley_neumann, inverse
from manifold_tying.linalg._inverse_sqrt import series
from manifold_tying.precision import eye_like, full_precision, gram


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
    if base.dtype == torch.float32 and base.shape[-2] * base.shape[-1] <= SMALL:
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
        M = inverse(eye + wide.mT @ wide / 4 - K.double() / 2)
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
    M = inverse(eye - _skew_of_lower(Y))
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
    M = inverse(eye_like(S) + gram(Z) / 4 - (S - S.mT) / 4)
    X = torch.add(Z, base, alpha=2) @ M - base
    G = gram(X)
    # X (XᵀX)^(-1/2) by its series, which reduces ‖XᵀX - I‖₂ = 0.1 to 1e-6.
    return X + X @ series(G - eye_like(G), torch.finfo(G.dtype).eps, sync_free=True)[0], Z, M


_tall_cayley = custom_gradient(_TallCayley, lambda base, Y: _tall_cayley_and_parts(base.detach(), Y)[0])


def _skew_of_lower(Y: Tensor) -> Tensor:
    """tril(Y, -1) - tril(Y, -1)ᵀ; copying the transpose first halves the time of the subtraction."""
    lower = Y.tril(-1)
    return lower - lower.mT.contiguous()
