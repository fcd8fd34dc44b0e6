"""The weight W = R W0 P, and the linear layer that forms it, without keeping a matrix of W's size for the backward.

W0 lies with its rows and columns in the order in which they rotate, block after block: there R and P are block-diagonal, and W
and both gradients are products of slices.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import Blocks, multiply, multiply_rows, outer
from manifold_tying.parametrizations._orders import Orders, take
from manifold_tying.parametrizations._rotations import Rotations


def equivalent_weight(ordered_base: Tensor, stored: Tensor, rotations: Rotations, orders: Orders) -> Tensor:
    """W = R W0 P, (..., m, n), in the dtype of the stored vector; differentiable with respect to it."""
    return _equivalent_weight(ordered_base, stored, rotations, *orders)


def transformed(ordered_base: Tensor, R: Blocks, P: Blocks, orders: Orders) -> Tensor:
    """W = R W0 P by products, (..., m, n), in the dtype of the blocks (float32 or float64), in its own order."""
    with linalg.full_precision(ordered_base.device):
        spares = _Spares(ordered_base)
        W0, M = _half_way(ordered_base, P, orders, spares)
        if W0 is not ordered_base and W0 is not M:
            spares.give(W0)
        return _weight(M, R, orders, spares, done=M is not ordered_base)


class _Spares:
    """Matrices of W's size that are done with, to be written again: new memory costs a CPU more than what goes into it."""

    def __init__(self, like: Tensor) -> None:
        self.usable = like.ndim == 2 and not linalg.is_traced()
        self.free: list[Tensor] = []

    def give(self, done: Tensor) -> None:
        if self.usable:
            self.free.append(done)

    def get(self) -> Tensor | None:
        """One of them; None where there is none, for ``out=``."""
        return self.free.pop() if self.free else None


def reordered(W: Tensor, rows: Tensor, columns: Tensor, spares: _Spares | None = None, *, done: bool = False) -> Tensor:
    """W (..., m, n) with its rows and columns in those orders, W itself where both are empty; done: W may be written over."""
    spares = spares or _Spares(W)
    for dim, order in ((-2, rows), (-1, columns)):
        if len(order):
            out = spares.get()
            moved = torch.index_select(W, dim, order, out=out) if dim == -2 else take(W, order, out)
            if done:
                spares.give(W)
            W, done = moved, True
    return W


def _half_way(ordered_base: Tensor, P: Blocks, orders: Orders, spares: _Spares) -> tuple[Tensor, Tensor]:
    """W0, and M = W0 P, which is W0 itself where no column rotates."""
    W0 = ordered_base.to(P[0].dtype)
    return W0, multiply(W0, P, True, spares.get()) if len(orders.columns) else W0


def _weight(M: Tensor, R: Blocks, orders: Orders, spares: _Spares, *, done: bool = False) -> Tensor:
    """W in its own order from M = W0 P; done: M may be written over."""
    W = M
    if len(orders.rows):
        W = multiply_rows(M, R, False, spares.get())
        if done:
            spares.give(M)
        done = True
    return reordered(W, orders.rows_back, orders.columns_back, spares, done=done)


def _gradients(
    W0: Tensor, M: Tensor, R: Blocks, P: Blocks, grad_W: Tensor, orders: Orders, spares: _Spares
) -> tuple[Blocks, Blocks]:
    """Those of R's and P's blocks from that of W, which is in its own order."""
    grad = reordered(grad_W.to(M.dtype), orders.rows, orders.columns, spares)
    # Rows as columns: for R the tokens are the columns of W.
    of_R = outer(grad.mT, M.mT, R)
    return of_R, outer(W0, multiply_rows(grad, R, True, spares.get()) if len(orders.rows) else grad, P)


class _Weight(Function):
    @staticmethod
    def forward(ctx: Any, ordered_base: Tensor, stored: Tensor, rotations: Rotations, *tensors: Tensor) -> Tensor:
        linalg.save(ctx, (ordered_base, stored, rotations, *tensors))
        return _plain_weight(ordered_base, stored, rotations, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_W: Tensor) -> tuple[Tensor | None, ...]:
        (ordered_base, stored, rotations, *tensors), _ = linalg.saved(ctx)
        orders, skews = Orders(*tensors), rotations.skews(stored)
        R, P = rotations.blocks(skews)
        with linalg.full_precision(ordered_base.device):
            spares = _Spares(ordered_base)
            W0, M = _half_way(ordered_base, P, orders, spares)
            grads = _gradients(W0, M, R, P, grad_W, orders, spares)
        return None, rotations.gradient(skews, *grads), None, *[None] * len(orders)


def _plain_weight(ordered_base: Tensor, stored: Tensor, rotations: Rotations, *tensors: Tensor) -> Tensor:
    return transformed(ordered_base, *rotations.blocks(rotations.skews(stored)), Orders(*tensors))


_equivalent_weight = linalg.closed_form(_Weight, _plain_weight)


class _WeightCentric(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ordered_base: Tensor,
        bias: Tensor | None,
        stored: Tensor,
        rotations: Rotations,
        *tensors: Tensor,
    ) -> Tensor:
        linalg.save(ctx, (x, ordered_base, bias, stored, rotations, *tensors))
        return _plain_linear(x, ordered_base, bias, stored, rotations, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, ordered_base, _, stored, rotations, *tensors), _ = linalg.saved(ctx)
        orders, skews = Orders(*tensors), rotations.skews(stored)
        R, P = rotations.blocks(skews)
        needs_x, _, needs_bias, needs_stored, *_ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_stored = None
        spares = _Spares(ordered_base)
        with linalg.full_precision(ordered_base.device):
            W0, M = _half_way(ordered_base, P, orders, spares)
            W = _weight(M, R, orders, spares) if needs_x else None
        if W is not None:
            grad_x = grad @ W.to(grad.dtype)
            spares.give(W)
        if needs_stored:
            grad_W = flat.mT @ x.reshape(-1, x.shape[-1])
            with linalg.full_precision(ordered_base.device):
                grads = _gradients(W0, M, R, P, grad_W, orders, spares)
            grad_stored = rotations.gradient(skews, *grads)
        return grad_x, None, flat.sum(0) if needs_bias else None, grad_stored, None, *[None] * len(orders)


def _plain_linear(
    x: Tensor, ordered_base: Tensor, bias: Tensor | None, stored: Tensor, rotations: Rotations, *tensors: Tensor
) -> Tensor:
    return F.linear(x, _plain_weight(ordered_base, stored, rotations, *tensors).to(x.dtype), bias)


weight_centric_linear = linalg.closed_form(_WeightCentric, _plain_linear)
"""x Wᵀ + bias with W formed in the stored vector's dtype and cast to x's, and formed again in the backward."""
