"""The linear layer with W = R W0 P that rotates activations and never forms W."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import multiply, outer, rotated
from manifold_tying.parametrizations._orders import put, take
from manifold_tying.parametrizations._rotations import Rotations

_BLOCK_ENTRIES = 2**21  # of a block of tokens: what fits a processor's cache
_FEWEST_ROWS = 1024  # below, products are slow: each reads all of W0, 180 MB of it in a layer of 11,008 x 4,096

Room = Callable[[str, int], Tensor | None]
"""Memory of that name for a block of tokens, of so many columns; None: to be allocated."""


class InputCentric(torch.autograd.Function):
    """((x Pᵀ) W0ᵀ) Rᵀ + bias for x (T, n), a block of tokens at a time: what lies between the products stays in the cache.

    In float32 the first product adds the bias as nn.Linear's does, so that R = I gives its result bit for bit; what R made of
    the bias is put right after, and taken out of R's gradient. In 16 bits that would leave the rounding of the bias in the
    gradient, so it is added last.
    """

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
        W0, (R, P) = base.to(x.dtype), rotations.blocks(stored, x.dtype)
        early = bias if _adds_early(bias) else None
        rest = bias if early is None else early - rotated(early[None], R, order_R)[0]

        def of_block(room: Room, x: Tensor, y: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
            h = x
            if len(order_P):
                z = multiply(take(x, order_P, room("taken", len(order_P))), P, False, room("rotated", len(order_P)))
                h = put(x, z, order_P, room("h", x.shape[-1]))
            out = room("u", len(W0))
            u = torch.mm(h, W0.mT, out=out) if early is None else torch.addmm(early, h, W0.mT, out=out)
            v = take(u, order_R, v)
            y = put(u, multiply(v, R, False, room("turned", len(order_R))), order_R, y)
            if rest is not None:  # not in place where compiled: see linalg._cayley on what a forward returns
                y = y + rest if torch.compiler.is_compiling() else y.add_(rest)
            return y, v

        y, v = _by_blocks(of_block, base, (x,), (len(base), len(order_R)))
        ctx.save_for_backward(x, v, base, bias, stored, order_R, order_P)
        ctx.rotations = rotations
        return y

    @staticmethod
    @linalg.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, v, base, bias, stored, order_R, order_P = ctx.saved_tensors
        R, P = ctx.rotations.blocks(stored, x.dtype)
        W0 = base.to(grad.dtype)
        of_R, of_P = (
            (torch.zeros_like(G, dtype=stored.dtype), torch.zeros_like(H, dtype=stored.dtype)) for G, H in (R, P)
        )

        def of_block(room: Room, grad: Tensor, v: Tensor, x: Tensor, grad_x: Tensor | None) -> tuple[Tensor]:
            g = take(grad, order_R, room("taken", len(order_R)))
            outer(g, v, R, of_R)
            g = multiply(g, R, True, room("rotated", len(order_R)))
            grad_h = torch.mm(put(grad, g, order_R, room("u", len(base))), W0, out=room("h", x.shape[-1]))
            g = take(grad_h, order_P, room("taken of h", len(order_P)))
            outer(g, take(x, order_P, room("of x", len(order_P))), P, of_P)
            return (put(grad_h, multiply(g, P, True, room("of x", len(order_P))), order_P, grad_x),)

        (grad_x,) = _by_blocks(of_block, base, (grad, v, x), (x.shape[-1],))
        grad_bias = None
        if bias is not None:
            grad_bias = grad.sum(0)
            if _adds_early(bias):  # v has the bias in it, which R does not rotate
                outer(take(-grad_bias[None], order_R), take(bias[None], order_R), R, of_R)
        grad_stored = ctx.rotations.gradient(stored, of_R, of_P, x.dtype) if ctx.needs_input_grad[3] else None
        return (grad_x if ctx.needs_input_grad[0] else None), None, grad_bias, grad_stored, None, None, None


def _adds_early(bias: Tensor | None) -> bool:
    return bias is not None and bias.dtype.itemsize >= 4


def _by_blocks(
    function: Callable[..., tuple[Tensor, ...]], base: Tensor, tensors: Sequence[Tensor], widths: Sequence[int]
) -> Sequence[Tensor]:
    """function(room, *tensors, *results) on tensors (T, ...) to results (T, width), a block of tokens at a time.

    On a CPU what lies between the products then stays in the cache, in memory that is taken from the system once: new
    memory costs more than the gathers into it.
    """
    like, tokens = tensors[0], len(tensors[0])
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return function(lambda name, width: None, *tensors, *[None] * len(widths))
    rows = max(_FEWEST_ROWS, _BLOCK_ENTRIES // max(base.shape))
    rooms: dict[str, Tensor] = {}

    def room(name: str, width: int) -> Tensor:
        if name not in rooms:
            rooms[name] = like.new_empty(min(rows, tokens), width)
        return rooms[name][: block.stop - block.start]

    results = [like.new_empty(tokens, width) for width in widths]
    for start in range(0, max(1, tokens), rows):  # of no tokens, one empty block
        block = slice(start, min(start + rows, tokens))
        function(room, *(tensor[block] for tensor in tensors), *(result[block] for result in results))
    return results
