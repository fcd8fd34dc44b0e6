"""The weight W = R W0 P and the linear layer with it, without keeping a matrix of W's size for the backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from manifold_tying import linalg
from manifold_tying.parametrizations._input_centric import InputCentric
from manifold_tying.parametrizations._primitive import Blocks, Primitive, outer, rotated, rotated_rows

Side = tuple[Blocks, Tensor]
"""The blocks of R or of P, and the order of the dimensions that they rotate."""


def equivalent_weight(base: Tensor, R: Side, P: Side) -> Tensor:
    """W = R W0 P, (..., m, n), in the dtype of the blocks; once differentiable with respect to the blocks."""
    return _Weight.apply(base, *R[0], *P[0], R[1], P[1])


def equivalence_linear(
    x: Tensor, base: Tensor, R: Side, P: Side, bias: Tensor | None = None, *, input_centric: bool
) -> Tensor:
    """x Wᵀ + bias for W = R W0 P: x (..., n), W0 (m, n), bias (m,) to (..., m), in x's dtype (autocast's, where it is on).

    Input-centric: ((x Pᵀ) W0ᵀ) Rᵀ + bias, which never forms W and keeps x, x Pᵀ W0ᵀ and nothing else. Weight-centric: W is
    formed in the blocks' dtype, cast to x's, used, and formed again in the backward. Equal to rounding.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    bias = None if bias is None else bias.to(x.dtype)
    if not input_centric:
        return _WeightCentric.apply(x, base, bias, *R[0], *P[0], R[1], P[1])
    y = InputCentric.apply(x.flatten(0, -2) if x.ndim > 1 else x[None], base, bias, *R[0], *P[0], R[1], P[1])
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


def _pulled_back(base: Tensor, R: Side, P: Side, grad_W: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of R's and P's blocks from that of W = R W0 P."""
    grad_R: tuple[Tensor | None, ...] = (None, None)
    grad_P: tuple[Tensor | None, ...] = (None, None)
    with linalg.full_precision(base.device):
        W0, grad_W = base.to(R[0][0].dtype), grad_W.to(R[0][0].dtype)
        if len(R[1]):
            M = rotated(W0, *P, True)
            # rows as columns: for R the tokens are the columns of W
            grad_R = outer(grad_W.index_select(-2, R[1]).mT, M.index_select(-2, R[1]).mT, R[0])
        if len(P[1]):
            grad_M = rotated_rows(grad_W, *R, True)
            grad_P = outer(W0.index_select(-1, P[1]), grad_M.index_select(-1, P[1]), P[0])
    return *grad_R, *grad_P


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, base: Tensor, GR: Tensor, HR: Tensor, GP: Tensor, HP: Tensor, order_R: Tensor, order_P: Tensor
    ) -> Tensor:
        ctx.save_for_backward(base, GR, HR, GP, HP, order_R, order_P)
        W = transformed(base, ((GR, HR), order_R), ((GP, HP), order_P))
        return W.clone() if W is base else W

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_W: Tensor) -> tuple[Tensor | None, ...]:
        base, GR, HR, GP, HP, order_R, order_P = ctx.saved_tensors
        grads = _pulled_back(base, ((GR, HR), order_R), ((GP, HP), order_P), grad_W)
        return None, *grads, None, None


class _WeightCentric(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor,
        bias: Tensor | None,
        GR: Tensor,
        HR: Tensor,
        GP: Tensor,
        HP: Tensor,
        order_R: Tensor,
        order_P: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, base, GR, HR, GP, HP, order_R, order_P)
        W = transformed(base, ((GR, HR), order_R), ((GP, HP), order_P))
        return F.linear(x, W.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, base, GR, HR, GP, HP, order_R, order_P = ctx.saved_tensors
        R, P = ((GR, HR), order_R), ((GP, HP), order_P)
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = None
        grads: tuple[Tensor | None, ...] = (None, None, None, None)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ transformed(base, R, P).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        if any(ctx.needs_input_grad[3:7]):
            grads = _pulled_back(base, R, P, flat.mT @ x.reshape(-1, x.shape[-1]))
        return grad_x, None, grad_bias, *grads, None, None
