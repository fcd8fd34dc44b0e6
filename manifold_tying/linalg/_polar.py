"""Polar factors by matmuls, eigenvalues or singular values, with a closed-form gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from manifold_tying.autograd import custom_gradient, flop_count, has_data, in_transform, is_exporting, save, saved
from manifold_tying.linalg._inverse_sqrt import inverse_sqrt_by_matmuls, near_inverse_sqrt
from manifold_tying.precision import check_finite, check_tall, compute_dtype, eye_like, full_precision, gram, sym

# Up to this many columns an eigendecomposition is as fast as the matmuls that replace it.
_FEW_COLUMNS = 64


def polar(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Thin polar factors Y = U H: U with orthonormal columns is the nearest such matrix to Y, H is symmetric and >= 0.

    Args:
        Y: (..., n, p), n >= p.

    Returns:
        U (..., n, p) and H (..., p, p), contiguous, in Y's dtype.

    By matmuls if Y has more than 64 columns and a condition of up to about 5, as the stored tensor of a parametrization has.
    Otherwise by a float64 eigendecomposition of the p x p Gram matrix, or a float64 SVD if Y is too ill-conditioned for that
    (about 50).

    If Y is rank-deficient, H is unique and U is one of many. There are three derivatives; they divide by h_i + h_j only, so
    equal singular values are harmless. Raises ValueError if Y is wide, not floating, or contains NaN or Inf. (PIT, equation 7.)
    """
    check_tall(Y)
    W = Y.to(compute_dtype(Y.dtype))
    opaque = not has_data(W) or (torch.compiler.is_compiling() and not in_transform())
    factors = _exportable if is_exporting() else _opaque if opaque else _factors
    U, H = factors(W)
    return U.to(Y.dtype), H.to(Y.dtype)


def _exportable(Y: Tensor) -> tuple[Tensor, Tensor]:
    """The factors by plain operations: an exported program runs where this package is not installed."""

    def constants(W: Tensor) -> tuple[Tensor, Tensor]:
        Q, R = torch.linalg.qr(W)
        left, _, Vh = torch.linalg.svd(R)
        U = Q @ (left @ Vh)
        return U, sym(U.mT @ W)

    return differentiable_polar(Y.double(), constants, derivatives=1)


def _factors(Y: Tensor) -> tuple[Tensor, Tensor]:
    with full_precision(Y.device):
        return _polar(Y)


def _lyapunov_cg(H: Tensor, C: Tensor) -> Tensor:
    """Solve ΩH + HΩ = C for skew Ω (..., p, p), with positive definite H and skew C, by conjugate gradients.

    One matmul per iteration; the error shrinks by (√κ - 1)/(√κ + 1), κ the condition of H.
    """
    tiny = torch.finfo(C.dtype).tiny

    def dot(A: Tensor, B: Tensor) -> Tensor:
        return (A * B).sum((-2, -1), keepdim=True)

    scale = C.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)  # squares of small gradients would underflow
    residual = C / scale
    X, direction, size = torch.zeros_like(C), residual.clone(), dot(residual, residual)
    enough = size * (4 * torch.finfo(C.dtype).eps) ** 2
    for _ in range(100):  # sufficient for float64 and κ = 30
        W = direction @ H
        image = W - W.mT.contiguous()
        step = size / dot(direction, image).clamp_min(tiny)
        X.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        before, size = size, dot(residual, residual)
        if not (size > enough).any():  # also stops at NaN
            break
        direction = torch.addcmul(residual, size / before.clamp_min(tiny), direction)
    return X * scale


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        G = gram(Y)
        factors = polar_matmuls(Y, G) if Y.shape[-1] > _FEW_COLUMNS and Y.numel() else None
        ctx.by_matmuls = factors is not None
        if factors is not None:
            U, H, inverse = factors
            save(ctx, (Y,), U, H, *([] if inverse is None else [inverse]))
            return U.contiguous(), H
        U, V, h = polar_eigh(Y, G)
        save(ctx, (Y,), U, V, h)
        return U.contiguous(), sym((V * h[..., None, :]) @ V.mT).to(Y.dtype)

    @staticmethod
    def backward(ctx: Any, grad_U: Tensor | None, grad_H: Tensor | None) -> Tensor:
        # With dY = U A + U⊥ B: dU = U Ω + U⊥ B H⁻¹, ΩH + HΩ = A - Aᵀ, and H dH + dH H = H A + AᵀH.
        _, (U, H_or_V, *rest) = saved(ctx)
        grad_U = torch.zeros_like(U) if grad_U is None else grad_U
        with full_precision(U.device):
            if ctx.by_matmuls:
                return _backward_by_matmuls(U, H_or_V, rest[0] if rest else None, grad_U, grad_H)
            return _backward_eigh(U, H_or_V, rest[0], grad_U, grad_H)


def _plain(Y: Tensor) -> tuple[Tensor, Tensor]:
    return differentiable_polar(Y, _opaque)


_polar = custom_gradient(_Polar, _plain)


def _backward_by_matmuls(U: Tensor, H: Tensor, inverse: Tensor | None, grad_U: Tensor, grad_H: Tensor | None) -> Tensor:
    M = U.mT @ grad_U
    C = M - M.mT.contiguous()
    if grad_H is None:
        X = _lyapunov_cg(H, C)
    else:
        S = sym(grad_H)
        HS = H @ S
        X = S + _lyapunov_cg(H, C + HS - HS.mT)
    if inverse is None:  # square: no U⊥
        return U @ X
    return U @ (X - M @ inverse) + grad_U @ inverse


def _backward_eigh(U: Tensor, V: Tensor, h: Tensor, grad_U: Tensor, grad_H: Tensor | None) -> Tensor:
    # In H's eigenbasis, solving either Sylvester equation is a division by h_i + h_j.
    h = torch.maximum(h, h.amax(-1, keepdim=True).clamp_min(1e-300) * 1e-14)
    M = U.mT @ grad_U
    X = V.mT @ (M - M.mT).double() @ V
    if grad_H is not None:
        X = X + 2 * h[..., :, None] * (V.mT @ sym(grad_H).double() @ V)
    X = X / (h[..., :, None] + h[..., None, :])
    inverse = (V / h[..., None, :]) @ V.mT
    # One matmul for both terms with U.
    inside = (V @ X @ V.mT - M.double() @ inverse).to(U.dtype)
    return U @ inside + grad_U @ inverse.to(U.dtype)


# The algorithm branches on the data, which a compiled graph cannot: there it is one opaque custom op.
@torch.library.custom_op("manifold_tying::polar", mutates_args=())
def _opaque(Y: Tensor) -> tuple[Tensor, Tensor]:
    with full_precision(Y.device):
        U, H = _Polar.apply(Y)
    return U, H


@torch.library.custom_op("manifold_tying::polar_backward", mutates_args=())
def _opaque_backward(Y: Tensor, grad_U: Tensor, grad_H: Tensor) -> Tensor:
    with torch.enable_grad():
        Y = Y.detach().requires_grad_()
        factors = _factors(Y)
    return torch.autograd.grad(factors, Y, (grad_U, grad_H))[0].contiguous()


_opaque.register_fake(lambda Y: (Y.new_empty(Y.shape), Y.new_empty(*Y.shape[:-2], Y.shape[-1], Y.shape[-1])))
_opaque.register_vmap(lambda info, in_dims, Y: (_opaque(Y.movedim(in_dims[0], 0)), (0, 0)))
_opaque_backward.register_fake(lambda Y, grad_U, grad_H: Y.new_empty(Y.shape))
register_flop_formula(torch.ops.manifold_tying.polar)(lambda Y, **_: flop_count(Y, 8, 4))
register_flop_formula(torch.ops.manifold_tying.polar_backward)(lambda Y, *_, **__: flop_count(Y, 6, 12))
_opaque.register_autograd(
    lambda ctx, grad_U, grad_H: _opaque_backward(*ctx.saved_tensors, grad_U, grad_H),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# Smallest allowed ratio of a Gram matrix's eigenvalues, in either dtype. Its rounding is eps times the largest: in float32 one
# Newton-Schulz step still restores U; in float64 the error of U grows with the condition squared, to 1e5 eps at 8e3.
_SMALLEST_EIGENVALUE = torch.finfo(torch.float32).eps ** 0.5


def polar_svd(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, V, h of the polar factors in float64, for any condition."""
    check_finite(Y)
    scale = Y.abs().amax((-2, -1), keepdim=True).double().clamp_min(1e-300)
    Q, R = torch.linalg.qr(Y.double() / scale)
    W, h, Vh = torch.linalg.svd(R)
    return ((Q @ W) @ Vh).to(Y.dtype), Vh.mT, h * scale[..., 0]


def polar_eigh(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., n, p), V (..., p, p) and h (..., p) with Y = U H, H = V diag(h) Vᵀ, from G = YᵀY; V and h in float64."""
    finite = bool(torch.isfinite(G).all())
    if finite:
        eigenvalues, V = torch.linalg.eigh(G.double())
        # Subnormal eigenvalues lose digits for any condition.
        type_info = torch.finfo(Y.dtype)
        threshold = (_SMALLEST_EIGENVALUE * eigenvalues[..., -1]).clamp_min(type_info.tiny / type_info.eps)
        finite = bool((eigenvalues[..., 0] > threshold).all())
    if not finite:
        return polar_svd(Y)
    h = eigenvalues.sqrt()
    U = Y @ ((V / h[..., None, :]) @ V.mT).to(Y.dtype)
    return _newton_schulz_step(U), V, h


def polar_matmuls(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """U, H and, for n > p, H⁻¹ by matmuls, from G = YᵀY; None if the condition is too large."""
    square = Y.shape[-2] == Y.shape[-1]
    if square and (U := _orthogonal_factor(Y, G)) is not None:
        return U, sym(U.mT @ Y), None
    found = inverse_sqrt_by_matmuls(G)
    if found is None:
        return None
    inverse, far = found
    U, H = Y @ inverse, G @ inverse
    if far:
        U = _newton_schulz_step(U)
        H = U.mT @ Y
    return U, sym(H), None if square else inverse


def _orthogonal_factor(Y: Tensor, G: Tensor) -> Tensor | None:
    """The polar factor of a square Y whose condition is not too large, else None.

    UᵀU by the product costs less here than what :func:`inverse_sqrt_by_matmuls` does.
    """
    for _ in range(3):
        D, r, precise = near_inverse_sqrt(G)
        Y = torch.addcmul(Y @ D, Y, r)
        if precise:
            return Y
        G = gram(Y)
    return None


def _newton_schulz_step(U: Tensor) -> Tensor:
    """One Newton-Schulz step: removes the rounding of G, whose condition is that of Y squared."""
    G = gram(U)
    return U @ (1.5 * eye_like(G) - 0.5 * G)


def differentiable_polar(
    Y: Tensor, factors: Callable[[Tensor], tuple[Tensor, Tensor]], derivatives: int = 3
) -> tuple[Tensor, Tensor]:
    """U and H of Y = U H as ``factors`` computes them.

    Newton steps for U H = Y and UᵀU = I, whose Jacobian is a constant, leave the values as they are; each makes one more
    derivative right. The Jacobian divides by h_i + h_j only: equal singular values are harmless.
    """
    with full_precision(Y.device):
        U0, H0 = U, H = factors(Y.detach())
        h, V = torch.linalg.eigh(H0.double())
        h = torch.maximum(h, h[..., -1:] * 1e-14)
        sums = h[..., :, None] + h[..., None, :]
        inverse = ((V / h[..., None, :]) @ V.mT).to(U0.dtype)
        for _ in range(derivatives):
            off, bent = _change(Y - U @ H), _change(U.mT @ U) / -2
            M = U0.mT @ off
            A = M - bent @ H0
            Omega = (V @ ((V.mT @ (A - A.mT).double() @ V) / sums) @ V.mT).to(A.dtype)
            U = U + U0 @ (Omega + bent) + (off - U0 @ M) @ inverse
            H = H + sym(A - Omega @ H0)
        return U, H


def _change(A: Tensor) -> Tensor:
    """0 with the derivatives of A."""
    return A - A.detach()
