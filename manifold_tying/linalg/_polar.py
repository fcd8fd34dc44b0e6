"""Polar factors with a closed-form gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manifold_tying.linalg._basics import (
    check_finite,
    check_tall,
    full_precision,
    gram,
    identity_like,
    symmetric,
    working_dtype,
)


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


def _polar_svd(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, V, h of the polar factors in float64, whatever the conditioning."""
    check_finite(Y)
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
