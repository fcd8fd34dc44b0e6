"""The weight W = R W0 P and the linear layer with it, without keeping a matrix of W's size for the backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from manifold_tying import linalg
from manifold_tying.parametrizations._input_centric import InputCentric
from manifold_tying.parametrizations._primitive import Blocks, Primitive, outer, rotated, rotated_rows
from manifold_tying.parametrizations._rotations import Rotations

Side = tuple[Blocks, Tensor]
"""The blocks of R or of P, and the order of the dimensions that they rotate."""


Orders = tuple[Tensor, Tensor]
"""The dimensions that R and that P rotate."""


def equivalent_weight(base: Tensor, stored: Tensor, rotations: Rotations, orders: Orders) -> Tensor:
    """W = R W0 P, (..., m, n), in the dtype of the stored vector; once differentiable with respect to it."""
    return _Weight.apply(base, stored, *orders, rotations)


def equivalence_linear(
    x: Tensor,
    base: Tensor,
    stored: Tensor,
    rotations: Rotations,
    orders: Orders,
    bias: Tensor | None = None,
    *,
    input_centric: bool,
) -> Tensor:
    """x Wᵀ + bias for W = R W0 P: x (..., n), W0 (m, n), bias (m,) to (..., m), in x's dtype (autocast's, where it is on).

    Input-centric: ((x Pᵀ) W0ᵀ) Rᵀ + bias, which never forms W and keeps x, x Pᵀ W0ᵀ and nothing else. Weight-centric: W is
    formed in the stored vector's dtype, cast to x's, used, and formed again in the backward; it keeps x. Equal to rounding.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    bias = None if bias is None else bias.to(x.dtype)
    if not input_centric:
        return _WeightCentric.apply(x, base, bias, stored, *orders, rotations)
    y = InputCentric.apply(x.flatten(0, -2) if x.ndim > 1 else x[None], base, bias, stored, *orders, rotations)
    return y.view(*x.shape[:-1], len(base))


def linear_operations(tokens: int, R: Primitive, P: Primitive, *, input_centric: bool, training: bool = True) -> int:
    """Operations of a linear layer's products, those of the Cayley maps aside; nn.Linear's are 6Tmn, and 2Tmn forward alone.

    With T tokens, W (m, n) and blocks of b on both sides the forward and backward take 4Tmn + 6T(m + n)b operations
    input-centric, 6Tmn + 14mnb weight-centric: four products of mnb form W twice, three are its gradient. Without a
    backward 2Tmn + 2T(m + n)b and 2Tmn + 4mnb.
    """
    m, n = R.n, P.n
    of_tokens = tokens * (R.covered * R.block + P.covered * P.block)
    of_weight = n * R.covered * R.block + m * P.covered * P.block
    if not training:
        return 2 * tokens * m * n + 2 * (of_tokens if input_centric else of_weight)
    return 4 * tokens * m * n + 6 * of_tokens if input_centric else 6 * tokens * m * n + 7 * of_weight


def prefers_input_centric(tokens: int, R: Primitive, P: Primitive, training: bool = True) -> bool:
    """Whether rotating the activations takes fewer operations than forming W."""
    by_input, by_weight = (
        linear_operations(tokens, R, P, input_centric=choice, training=training) for choice in (True, False)
    )
    return by_input <= by_weight


def transformed(base: Tensor, R: Side, P: Side) -> Tensor:
    """W = R W0 P by products, (..., m, n), in the dtype of the blocks (float32 or float64)."""
    with linalg.full_precision(base.device):
        return rotated_rows(rotated(base.to(R[0][0].dtype), *P, True), *R)


def _pulled_back(base: Tensor, R: Side, P: Side, grad_W: Tensor) -> tuple[Blocks, Blocks]:
    """The gradients of R's and P's blocks from that of W = R W0 P."""
    of_R, of_P = ((torch.zeros_like(G), torch.zeros_like(H)) for (G, H), _ in (R, P))
    with linalg.full_precision(base.device):
        W0, grad_W = base.to(R[0][0].dtype), grad_W.to(R[0][0].dtype)
        if len(R[1]):
            M = rotated(W0, *P, True)
            # rows as columns: for R the tokens are the columns of W
            of_R = outer(grad_W.index_select(-2, R[1]).mT, M.index_select(-2, R[1]).mT, R[0])
        if len(P[1]):
            grad_M = rotated_rows(grad_W, *R, True)
            of_P = outer(W0.index_select(-1, P[1]), grad_M.index_select(-1, P[1]), P[0])
    return of_R, of_P


class _Weight(torch.autograd.Function):
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
    @once_differentiable
    def backward(ctx: Any, grad_W: Tensor) -> tuple[Tensor | None, ...]:
        base, stored, order_R, order_P = ctx.saved_tensors
        R, P = ctx.rotations.blocks(stored)
        grads = _pulled_back(base, (R, order_R), (P, order_P), grad_W)
        return None, ctx.rotations.gradient(stored, *grads), None, None, None


class _WeightCentric(torch.autograd.Function):
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, base, stored, order_R, order_P = ctx.saved_tensors
        blocks = ctx.rotations.blocks(stored)
        R, P = (blocks[0], order_R), (blocks[1], order_P)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = grad_stored = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ transformed(base, R, P).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        if ctx.needs_input_grad[3]:
            grads = _pulled_back(base, R, P, flat.mT @ x.reshape(-1, x.shape[-1]))
            grad_stored = ctx.rotations.gradient(stored, *grads)
        return grad_x, None, grad_bias, grad_stored, None, None, None
