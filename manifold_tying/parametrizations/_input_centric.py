"""The linear layer with W = R W0 P that rotates activations and never forms W."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import multiply, outer
from manifold_tying.parametrizations._orders import Orders, take
from manifold_tying.parametrizations._rotations import Rotations

_BLOCK_ENTRIES = 2**21  # of a block of tokens: what fits a processor's cache
_FEWEST_ROWS = 1024  # below, products are slow: each reads all of W0, 180 MB of it in a layer of 11,008 x 4,096

Room = Callable[[int, int], Tensor | None]
"""One of two memories for a block of tokens, 0 or 1, with so many columns; None: to be allocated."""


class _InputCentric(torch.autograd.Function):
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
        y, v = _forward(x, ordered_base, bias, stored, rotations, *tensors)
        linalg.save(ctx, (x, ordered_base, bias, stored, rotations, *tensors), v)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, ordered_base, _, stored, rotations, *tensors), (v,) = linalg.saved(ctx)
        orders, skews = Orders(*tensors), rotations.skews(stored)
        R, P = rotations.blocks(skews, x.dtype)
        W0, rotating = ordered_base.to(grad.dtype), orders.columns[: rotations.P.covered]
        m, n = W0.shape
        of_R, of_P = (
            (torch.zeros_like(G, dtype=stored.dtype), torch.zeros_like(H, dtype=stored.dtype)) for G, H in (R, P)
        )

        def of_block(room: Room, grad: Tensor, v: Tensor, x: Tensor, grad_x: Tensor | None) -> tuple[Tensor]:
            if len(orders.rows):
                grad = take(grad, orders.rows, room(0, m))
                outer(grad, v, R, of_R)
                grad = multiply(grad, R, True, room(1, m))
            if not len(rotating):
                return (torch.mm(grad, W0, out=grad_x),)
            g = torch.mm(grad, W0, out=room(0, n))
            outer(g, take(x, rotating, room(1, len(rotating))), P, of_P)
            return (take(multiply(g, P, True, room(1, n)), orders.columns_back, grad_x),)

        (grad_x,) = _by_blocks(of_block, ordered_base, (grad, v, x), (n,))
        needs_x, _, needs_bias, needs_stored, *_ = ctx.needs_input_grad
        return (
            grad_x if needs_x else None,
            None,
            grad.sum(0) if needs_bias else None,
            rotations.gradient(skews, of_R, of_P, x.dtype) if needs_stored else None,
            None,
            *[None] * len(orders),
        )


def _forward(
    x: Tensor, ordered_base: Tensor, bias: Tensor | None, stored: Tensor, rotations: Rotations, *tensors: Tensor
) -> Sequence[Tensor]:
    """The result and what R's gradient needs, the rotating columns of x Pᵀ W0ᵀ."""
    orders, (R, P) = Orders(*tensors), rotations.blocks(rotations.skews(stored), x.dtype)
    W0, covered = ordered_base.to(x.dtype), rotations.R.covered
    m, n = W0.shape

    def of_block(room: Room, x: Tensor, y: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        if len(orders.columns):
            x = multiply(take(x, orders.columns, room(0, n)), P, False, room(1, n))
        u = torch.mm(x, W0.mT, out=v if covered == m else room(0, m) if covered else y)
        y = take(multiply(u, R, False, room(1, m)), orders.rows_back, y) if covered else u
        if covered < m:
            rotating = u[:, :covered]  # R's gradient does not ask for the others
            u = rotating.clone() if v is None else v.copy_(rotating)
        if bias is not None:  # not in place where compiled: see linalg._cayley on what a forward returns
            y = y + bias if linalg.is_traced() else y.add_(bias)
        return y, u

    return _by_blocks(of_block, ordered_base, (x,), (m, covered))


def _by_blocks(
    function: Callable[..., tuple[Tensor, ...]], base: Tensor, tensors: Sequence[Tensor], widths: Sequence[int]
) -> Sequence[Tensor]:
    """function(room, *tensors, *results) on tensors (T, ...) to results (T, width), a block of tokens at a time.

    On a CPU what lies between the products then stays in the cache, in memory that is taken from the system once: new
    memory costs more than the gathers into it.
    """
    like, tokens, widest = tensors[0], len(tensors[0]), max(base.shape)
    if like.device.type != "cpu" or linalg.is_traced():
        return function(lambda which, width: None, *tensors, *[None] * len(widths))
    rows = min(max(_FEWEST_ROWS, _BLOCK_ENTRIES // widest), tokens)
    rooms = like.new_empty(2, rows * widest)
    results = [like.new_empty(tokens, width) for width in widths]
    for start in range(0, max(1, tokens), max(1, rows)):  # of no tokens, one empty block
        block = slice(start, min(start + rows, tokens))

        def room(which: int, width: int, count: int = block.stop - start) -> Tensor:
            return rooms[which, : count * width].view(count, width)

        function(room, *(tensor[block] for tensor in tensors), *(result[block] for result in results))
    return results


input_centric_linear = linalg.closed_form(_InputCentric, lambda *args: _forward(*args)[0])
"""((x Pᵀ) W0ᵀ) Rᵀ + bias for x (T, n), a block of tokens at a time: what lies between the products stays in the cache.

W0 has its rows and columns in the order in which they rotate, so that only x and the result are gathered.
"""
