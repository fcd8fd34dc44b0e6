"""The polar factors, differentiable to any order, in either mode and under torch.func.

All derivatives are matmuls and solutions of ΩH + HΩ = C, whose own derivatives have the same form.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from manifold_tying.precision import eye_like, full_precision, sym


class DifferentiablePolar(Function):
    """(U, H) of Y (..., n, p), computed by ``factors``, which may branch on values."""

    @staticmethod
    def forward(Y: Tensor, factors: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return factors(Y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, grad_U: Tensor, grad_H: Tensor) -> tuple[Tensor, None]:
        U, H = ctx.saved_tensors
        with full_precision(U.device):
            M = U.mT @ grad_U
            X = Lyapunov.apply(H, M - M.mT + 2 * H @ sym(grad_H))
            return U @ X + (grad_U - U @ M) @ _inverse(H), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        U, H = primals(ctx.saved_tensors)
        with forward_ad._set_fwd_grad_enabled(
            True
        ):  # torch runs a jvp with it off: the derivatives of this one would be 0
            A = U.mT @ tangent
            Omega = Lyapunov.apply(H, A - A.mT)
            return U @ Omega + (tangent - U @ A) @ _inverse(H), sym(A - Omega @ H)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], Y: Tensor, factors: Any) -> tuple[Any, Any]:
        assert in_dims[0] is not None
        return DifferentiablePolar.apply(Y.movedim(in_dims[0], 0), factors), (0, 0)


class Lyapunov(Function):
    """Ω with ΩH + HΩ = C, for symmetric positive semidefinite H and C of its shape (..., p, p)."""

    @staticmethod
    def forward(H: Tensor, C: Tensor) -> Tensor:
        h, V = torch.linalg.eigh(H.double())
        h = torch.maximum(h, h[..., -1:].clamp_min(1e-300) * 1e-14)
        return (V @ ((V.mT @ C.double() @ V) / (h[..., :, None] + h[..., None, :])) @ V.mT).to(C.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        H, X = ctx.saved_tensors
        with full_precision(H.device):
            of_C = Lyapunov.apply(H, grad)
            return -(of_C @ X.mT + X.mT @ of_C), of_C

    @staticmethod
    def jvp(ctx: Any, of_H: Tensor, of_C: Tensor) -> Tensor:
        H, X = primals(ctx.saved_tensors)
        with forward_ad._set_fwd_grad_enabled(True):
            return Lyapunov.apply(H, of_C - of_H @ X - X @ of_H)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *matrices: Tensor) -> tuple[Tensor, int]:
        return Lyapunov.apply(*batch_first(info, in_dims, matrices)), 0


def _inverse(H: Tensor) -> Tensor:
    return Lyapunov.apply(H, 2 * eye_like(H).expand_as(H))


def batch_first(info: Any, in_dims: tuple[int | None, ...], matrices: Iterable[Tensor]) -> list[Tensor]:
    """The arguments of a vmap rule with the mapped dimension in front."""
    return [
        A.expand(info.batch_size, *A.shape) if dim is None else A.movedim(dim, 0)
        for A, dim in zip(matrices, in_dims, strict=True)
    ]


def primals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors without the tangents of the current jvp level, which would call this jvp again."""
    return [forward_ad.unpack_dual(tensor).primal for tensor in tensors]
