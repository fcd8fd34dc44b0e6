"""Polar factors with a closed-form gradient."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying.linalg._basics import (
    check_finite,
    check_tall,
    full_precision,
    gram,
    identity_like,
    symmetric,
    working_dtype,
)
from manifold_tying.linalg._once import once_differentiable

_ROUNDS_UNPOLISHED = 2  # singular values of 0.6 of the common scale take two: their squares cost few digits
# Up to here an eigendecomposition is as fast as the products that replace it.
_FEW_COLUMNS = 64


def polar(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Thin polar factors Y = U H: U with orthonormal columns is the nearest such matrix to Y, H is symmetric and >= 0.

    Args:
        Y: (..., n, p), n >= p.

    Returns:
        U (..., n, p) and H (..., p, p), contiguous, in Y's dtype.

    By products alone where Y has more than 64 columns and singular values within about 0.4 to 1.4 times a common scale, as
    the stored tensor of a parametrization has. Else from a float64 eigendecomposition of the p x p Gram matrix, through
    a float64 SVD where Y is too ill-conditioned for that (about 50 in float32).
    Where Y is rank-deficient, H is unique, U one of many. The gradient is closed form, once differentiable; it divides by
    h_i + h_j only, so equal singular values are harmless. Raises ValueError for a wide, non-floating, NaN or infinite Y.
    (PIT, equation 7.)
    """
    check_tall(Y)
    with full_precision(Y.device):
        W = Y.to(working_dtype(Y.dtype))
        U, H = _Polar.apply(W)
    return U.to(Y.dtype), H.to(Y.dtype)


def _polar_svd(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, V, h of the polar factors in float64, whatever the conditioning."""
    check_finite(Y)
    scale = Y.abs().amax((-2, -1), keepdim=True).double().clamp_min(1e-300)
    Q, R = torch.linalg.qr(Y.double() / scale)
    W, h, Vh = torch.linalg.svd(R)
    return ((Q @ W) @ Vh).to(Y.dtype), Vh.mT, h * scale[..., 0]


def _polar_eigh(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., n, p), V (..., p, p) and h (..., p) with Y = U H, H = V diag(h) Vᵀ, from G = YᵀY; V and h in float64."""
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
    return _polished(U), V, h


def _polar_products(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """U, H and, for n > p, H⁻¹ by products, from G = YᵀY; None where that does not converge.

    A tall Y has the H of its p x p Cholesky factor, and U = Y H⁻¹.
    """
    if Y.shape[-2] == Y.shape[-1]:
        U, _ = _nearest_orthogonal(Y, G)
        return None if U is None else (U, symmetric(U.mT @ Y), None)
    L, info = torch.linalg.cholesky_ex(G)
    W, rounds = (None, 0) if info.any() else _nearest_orthogonal(L.mT, G)
    if W is None:
        return None
    inverse = torch.linalg.solve_triangular(L.mT, W, upper=True)
    U = Y @ inverse
    if rounds > _ROUNDS_UNPOLISHED:
        U = _polished(U)
    return U, symmetric(L @ W), inverse


def _polished(U: Tensor) -> Tensor:
    """U without the rounding that G's condition, the square of Y's, has left in it."""
    G = gram(U)
    return U @ (1.5 * identity_like(G) - 0.5 * G)


def _nearest_orthogonal(S: Tensor, G: Tensor) -> tuple[Tensor | None, int]:
    """The orthogonal polar factor of square S, from G = SᵀS, and how many rounds it took.

    None where S is not a multiple of a nearly orthogonal matrix.

    U <- U (I + E)^(-1/2) with E = UᵀU - I, by two, three or five terms of its series. Those sums are positive for every E that
    they are used for, so that where UᵀU comes out as the identity, UᵀS is positive definite.
    """
    eye = identity_like(G)
    root_p, type_info = G.shape[-1] ** 0.5, torch.finfo(G.dtype)
    enough = 2 * type_info.eps * root_p
    c = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    if not c.amin() > type_info.tiny / type_info.eps:
        return None, 0
    U, E = S / c.sqrt(), G / c - eye
    for rounds in range(1, 6):
        size = torch.linalg.matrix_norm(E).amax()
        if not size < 0.5 * root_p:  # also where it is NaN
            break
        step, left = E / -2, size**2  # three eighths of that are left
        if left > enough:
            E2 = E @ E
            step, left = step + 0.375 * E2, size**3
            if left > enough:
                step, left = step + E2 @ (35 / 128 * E2 - 0.3125 * E), size**5
        U = U + U @ step
        if left <= enough:
            return U, rounds
        E = gram(U) - eye
    return None, 0


def _solve_skew(H: Tensor, C: Tensor) -> Tensor:
    """The skew Ω (..., p, p) with ΩH + HΩ = C for positive definite H and skew C, by conjugate gradients.

    One product each, and the error falls by (√κ - 1)/(√κ + 1), κ the condition of H.
    """
    tiny = torch.finfo(C.dtype).tiny

    def dot(A: Tensor, B: Tensor) -> Tensor:
        return (A * B).sum((-2, -1), keepdim=True)

    scale = C.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # squares of small gradients would be 0
    residual = C / scale
    X, direction, size = torch.zeros_like(C), residual.clone(), dot(residual, residual)
    enough = size * (4 * torch.finfo(C.dtype).eps) ** 2
    for _ in range(100):  # enough for float64 and κ = 30
        W = direction @ H
        image = W - W.mT.contiguous()
        step = size / dot(direction, image).clamp_min(tiny)
        X.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        before, size = size, dot(residual, residual)
        if not (size > enough).any():  # leaves a NaN in X
            break
        direction = torch.addcmul(residual, size / before.clamp_min(tiny), direction)
    return X * scale


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        G = gram(Y)
        factors = _polar_products(Y, G) if Y.shape[-1] > _FEW_COLUMNS and Y.numel() else None
        ctx.by_products = factors is not None
        if factors is not None:
            U, H, inverse = factors
            ctx.save_for_backward(U, H, inverse)
            return U.contiguous(), H
        U, V, h = _polar_eigh(Y, G)
        ctx.save_for_backward(U, V, h)
        return U.contiguous(), symmetric((V * h[..., None, :]) @ V.mT).to(Y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_U: Tensor | None, grad_H: Tensor | None) -> Tensor:
        # With dY = U A + U⊥ B: dU = U Ω + U⊥ B H⁻¹, ΩH + HΩ = A - Aᵀ, and H dH + dH H = H A + AᵀH.
        U, H_or_V, inverse_or_h = ctx.saved_tensors
        grad_U = torch.zeros_like(U) if grad_U is None else grad_U
        backward = _backward_by_products if ctx.by_products else _backward_eigh
        with full_precision(U.device):
            return backward(U, H_or_V, inverse_or_h, grad_U, grad_H)


def _backward_by_products(
    U: Tensor, H: Tensor, inverse: Tensor | None, grad_U: Tensor, grad_H: Tensor | None
) -> Tensor:
    M = U.mT @ grad_U
    C = M - M.mT.contiguous()
    if grad_H is None:
        X = _solve_skew(H, C)
    else:
        S = symmetric(grad_H)
        HS = H @ S
        X = S + _solve_skew(H, C + HS - HS.mT)
    if inverse is None:  # square: there is no U⊥
        return U @ X
    return U @ (X - M @ inverse) + grad_U @ inverse


def _backward_eigh(U: Tensor, V: Tensor, h: Tensor, grad_U: Tensor, grad_H: Tensor | None) -> Tensor:
    # In H's eigenbasis both Sylvester equations are a division by h_i + h_j.
    floor = h.amax(-1, keepdim=True).clamp_min(1e-300) * 1e-14
    h = torch.maximum(h, floor)
    M = U.mT @ grad_U
    X = V.mT @ (M - M.mT).double() @ V
    if grad_H is not None:
        X = X + 2 * h[..., :, None] * (V.mT @ symmetric(grad_H).double() @ V)
    X = X / (h[..., :, None] + h[..., None, :])
    inverse = (V / h[..., None, :]) @ V.mT
    # Both terms that U multiplies go into one product.
    inside = (V @ X @ V.mT - M.double() @ inverse).to(U.dtype)
    return U @ inside + grad_U @ inverse.to(U.dtype)
