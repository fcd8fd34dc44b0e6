"""Orthonormal columns by the polar factor or QR."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from manifold_tying.autograd import custom_gradient, flop_count, has_data, in_transform, is_exporting, save, saved
from manifold_tying.linalg._polar import polar
from manifold_tying.precision import check_finite, check_tall, compute_dtype, eye_like, full_precision, gram

Orthonormalization = Literal["polar", "qr"]


def orthonormalize(Y: Tensor, method: Orthonormalization = "polar") -> Tensor:
    """Orthonormal columns with the same span as the columns of Y (..., n, p), n >= p.

    "polar" is the nearest such matrix. "qr" is the Q of a QR decomposition with a positive diagonal of R: from Cholesky
    factorizations of one or two Gram matrices, or by Householder reflections if those break down (from a condition of about 1e3
    in float32). Gradients are closed form.
    """
    check_tall(Y)
    if method not in get_args(Orthonormalization):
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(get_args(Orthonormalization))}")
    if method == "polar":
        return polar(Y)[0]
    W = Y.to(compute_dtype(Y.dtype))
    if is_exporting():  # plain operations: the program runs where this package is not installed
        return _householder_qr(W.double())[0].to(Y.dtype)
    opaque = not has_data(W) or (torch.compiler.is_compiling() and not in_transform())
    return (_opaque if opaque else _by_qr)(W).to(Y.dtype)


def _by_qr(Y: Tensor) -> Tensor:
    with full_precision(Y.device):
        return _qr(Y)


# The algorithm branches on the data, which a compiled graph cannot: there it is one opaque custom op.
@torch.library.custom_op("manifold_tying::orthonormalize", mutates_args=())
def _opaque(Y: Tensor) -> Tensor:
    return _by_qr(Y)


@torch.library.custom_op("manifold_tying::orthonormalize_backward", mutates_args=())
def _opaque_backward(Y: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        Y = Y.detach().requires_grad_()
        X = _by_qr(Y)
    return torch.autograd.grad(X, Y, grad)[0].contiguous()


_opaque.register_fake(lambda Y: Y.new_empty(Y.shape))
_opaque_backward.register_fake(lambda Y, grad: Y.new_empty(Y.shape))
register_flop_formula(torch.ops.manifold_tying.orthonormalize)(lambda Y, *_, **__: flop_count(Y, 4, 0))
register_flop_formula(torch.ops.manifold_tying.orthonormalize_backward)(lambda Y, *_, **__: flop_count(Y, 4, 0))
_opaque.register_autograd(
    lambda ctx, grad: _opaque_backward(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _cholesky_qr(Y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Q, R by Cholesky-QR, repeated if the first Q has a defect; None if Y is too ill-conditioned."""
    L, info = torch.linalg.cholesky_ex(gram(Y))
    if info.any() or not torch.isfinite(L).all():
        return None
    Q = _divide(Y, L.mT)
    G = gram(Q)
    off = torch.linalg.matrix_norm(G - eye_like(G)).amax()
    if off <= 6 * torch.finfo(Y.dtype).eps * Y.shape[-1] ** 0.5:
        return Q, L.mT
    if not off < 0.1:
        return None
    L2 = torch.linalg.cholesky(G)
    return _divide(Q, L2.mT), (L @ L2).mT


def _divide(Y: Tensor, R: Tensor, upper: bool = True) -> Tensor:
    """Y R⁻¹ for triangular R; for a tall Y by the inverse, since a matmul takes a third of a solve's time."""
    solve: Callable[..., Tensor] = torch.linalg.solve_triangular
    if Y.shape[-2] < 4 * Y.shape[-1]:
        return solve(R, Y, upper=upper, left=False)
    return Y @ solve(R, eye_like(R).expand_as(R), upper=upper)


class _QR(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor) -> Tensor:
        factors = _cholesky_qr(Y) if Y.numel() else None
        if factors is None:
            check_finite(Y)
            factors = _householder_qr(Y)
        Q, R = factors
        Q = Q.contiguous()
        save(ctx, (Y,), Q, R)
        return Q

    @staticmethod
    def backward(ctx: Any, grad_Q: Tensor) -> Tensor:
        # Ȳ = (Q̄ + Q copyltu(-Q̄ᵀQ)) R⁻ᵀ with copyltu(M) = tril(M) + tril(M, -1)ᵀ.
        _, (Q, R) = saved(ctx)
        with full_precision(Q.device):
            M = -(grad_Q.mT @ Q)
            inside = grad_Q + Q @ (M.tril() + M.tril(-1).mT)
            return _divide(inside, R.mT, upper=False)


def _householder_qr(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R with R's diagonal >= 0."""
    Q, R = torch.linalg.qr(Y)
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Y.dtype)
    return Q * sign[..., None, :], R * sign[..., :, None]


_qr = custom_gradient(_QR, lambda Y: _householder_qr(Y)[0].contiguous())
