"""The weight W = R W0 P, and the linear layer that forms it, without keeping a matrix of W's size for the backward.

What rotates is brought to the front once, rows and columns, block after block: in that order R and P are block-diagonal, and W
and both gradients are products of slices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import Blocks, Side, multiply, multiply_rows, outer
from manifold_tying.parametrizations._orders import completed, inverse, take
from manifold_tying.parametrizations._rotations import Rotations

Orders = tuple[Tensor, Tensor]
"""The dimensions that R and that P rotate."""


def equivalent_weight(base: Tensor, stored: Tensor, rotations: Rotations, orders: Orders) -> Tensor:
    """W = R W0 P, (..., m, n), in the dtype of the stored vector; once differentiable with respect to it."""
    return _Weight.apply(base, stored, *orders, rotations)


def transformed(base: Tensor, R: Side, P: Side) -> Tensor:
    """W = R W0 P by products, (..., m, n), in the dtype of the blocks (float32 or float64)."""
    with linalg.full_precision(base.device):
        spares = _Spares(base)
        W0, M = _half_way(base, R, P, spares)
        if M is not W0:
            spares.give(W0)
        return _weight(M, R, P, spares)


class _Spares:
    """Matrices of W's size that are done with, to be written again: new memory costs a CPU more than what goes into it."""

    def __init__(self, like: Tensor) -> None:
        self.usable = like.ndim == 2 and not torch.compiler.is_compiling()
        self.free: list[Tensor] = []

    def give(self, done: Tensor) -> None:
        if self.usable:
            self.free.append(done)

    def get(self) -> Tensor | None:
        """One of them; None where there is none, for ``out=``."""
        return self.free.pop() if self.free else None


def _half_way(base: Tensor, R: Side, P: Side, spares: _Spares) -> tuple[Tensor, Tensor]:
    """W0, and W0 P, in the order in which they rotate."""
    W0 = _ordered(base.to(R[0][0].dtype), R[1], P[1], spares)
    return W0, multiply(W0, P[0], True, spares.get()) if len(P[1]) else W0


def _weight(M: Tensor, R: Side, P: Side, spares: _Spares) -> Tensor:
    """W in its own order from M = W0 P in that of the rotations."""
    W = M
    if len(R[1]):
        turned = multiply_rows(W, R[0], False, spares.get())
        W = torch.index_select(turned, -2, inverse(completed(R[1], W.shape[-2])), out=spares.get())
        spares.give(turned)
    return take(W, inverse(completed(P[1], W.shape[-1])), spares.get()) if len(P[1]) else W


def _gradients(W0: Tensor, M: Tensor, R: Side, P: Side, grad_W: Tensor, spares: _Spares) -> tuple[Blocks, Blocks]:
    """Those of R's and P's blocks from that of W, which is in its own order; W0 and M = W0 P in that of the rotations."""
    grad = _ordered(grad_W.to(M.dtype), R[1], P[1], spares)
    # Rows as columns: for R the tokens are the columns of W.
    of_R = outer(grad.mT, M.mT, R[0])
    return of_R, outer(W0, multiply_rows(grad, R[0], True, spares.get()) if len(R[1]) else grad, P[0])


def _ordered(W: Tensor, rows: Tensor, columns: Tensor, spares: _Spares) -> Tensor:
    """What rotates first, the other rows and columns after it."""
    if len(rows):
        W = torch.index_select(W, -2, completed(rows, W.shape[-2]), out=spares.get())
    if not len(columns):
        return W
    ordered = take(W, completed(columns, W.shape[-1]), spares.get())
    if len(rows):  # else it is the caller's
        spares.give(W)
    return ordered


class _Weight(Function):
    @staticmethod
    def forward(
        ctx: Any, base: Tensor, stored: Tensor, order_R: Tensor, order_P: Tensor, rotations: Rotations
    ) -> Tensor:
        ctx.save_for_backward(base, stored, order_R, order_P)
        ctx.rotations = rotations
        R, P = rotations.blocks(stored)
        W = transformed(base, (R, order_R), (P, order_P))
        return W.clone() if W is base else W

    @staticmethod
    @linalg.once_differentiable
    def backward(ctx: Any, grad_W: Tensor) -> tuple[Tensor | None, ...]:
        base, stored, order_R, order_P = ctx.saved_tensors
        blocks = ctx.rotations.blocks(stored)
        R, P = (blocks[0], order_R), (blocks[1], order_P)
        with linalg.full_precision(base.device):
            spares = _Spares(base)
            grads = _gradients(*_half_way(base, R, P, spares), R, P, grad_W, spares)
        return None, ctx.rotations.gradient(stored, *grads), None, None, None


class WeightCentric(Function):
    """x Wᵀ + bias with W formed in the stored vector's dtype and cast to x's, and formed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor,
        bias: Tensor | None,
        stored: Tensor,
        order_R: Tensor,
        order_P: Tensor,
        rotations: Rotations,
    ) -> Tensor:
        ctx.save_for_backward(x, base, stored, order_R, order_P)
        ctx.rotations = rotations
        R, P = rotations.blocks(stored)
        return F.linear(x, transformed(base, (R, order_R), (P, order_P)).to(x.dtype), bias)

    @staticmethod
    @linalg.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, base, stored, order_R, order_P = ctx.saved_tensors
        blocks = ctx.rotations.blocks(stored)
        R, P = (blocks[0], order_R), (blocks[1], order_P)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = grad_stored = None
        spares = _Spares(base)
        with linalg.full_precision(base.device):
            W0, M = _half_way(base, R, P, spares)
            W = _weight(M, R, P, spares) if ctx.needs_input_grad[0] else None
        if W is not None:
            grad_x = grad @ W.to(grad.dtype)
            if W is not M:
                spares.give(W)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        if ctx.needs_input_grad[3]:
            grad_W = flat.mT @ x.reshape(-1, x.shape[-1])
            with linalg.full_precision(base.device):
                grads = _gradients(W0, M, R, P, grad_W, spares)
            grad_stored = ctx.rotations.gradient(stored, *grads)
        return grad_x, None, grad_bias, grad_stored, None, None, None
