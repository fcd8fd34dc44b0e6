"""Linear layer with W = R W0 P: two formulations, and a cost model that picks the cheaper one.

The rows and columns of W0 are stored in rotation order, so that R and P are block-diagonal. Only x and the result (or W) are
permuted.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manifold_tying import autograd, precision
from manifold_tying.poet.columns import by_activations
from manifold_tying.poet.rotation import block_matmul, block_matmul_rows, both_blocks, matmul_dtype, permute
from manifold_tying.poet.spec import Permutations, RotationSpec

# Cost model: float32 operations that take as long as moving one entry (also in low precision), and as one float32 operation
# in a bfloat16 layer. Fitted at 18 sizes on CPUs of 0.3 and 1 TFLOP/s. An H200's data sheet gives 100, 600 and 14.
_FLOPS_PER_MOVE, _FLOPS_PER_MOVE_LOW, _FLOAT32_COST = 750, 2700, 12


def poet_linear(
    x: Tensor, W0: Tensor, skew_params: Tensor, spec: RotationSpec, places: tuple[Tensor, Tensor],
    bias: Tensor | None = None, *, input_centric: bool, triton: bool = False,
) -> Tensor:  # fmt: skip
    """x Wᵀ + bias for W = R W0 P: x (..., n), W0 (m, n), bias (m,) to (..., m), in x's dtype or autocast's.

    Input-centric: ((x Pᵀ) W0ᵀ) Rᵀ never forms W; it saves x and x Pᵀ W0ᵀ for the backward. Weight-centric: forms W in the
    skew parameters' dtype, casts it to x's, and forms it again in the backward; it saves x. Both agree to rounding.
    ``places`` are those of the rows and columns in rotation order; ``triton``: input-centric by kernels.
    """
    x = x.to(precision.autocast_dtype(x))
    if input_centric:
        flat = x.flatten(0, -2) if x.ndim > 1 else x[None]
        y = by_activations(flat, W0, skew_params, *places, spec, triton).view(*x.shape[:-1], len(W0))
    else:
        weight_centric = _recomputed_weight_centric if torch.compiler.is_compiling() else _weight_centric
        y = weight_centric(x, W0, skew_params, spec, Permutations.of(*places))
    return y if bias is None else y + bias.to(y.dtype)


def arrange(W: Tensor, perms: Permutations) -> Tensor:
    """Permute a matrix (..., m, n) from the layer's order to rotation order."""
    W = permute(W, perms.rows, perms.rows_inverse, -2)
    return permute(W, perms.columns, perms.columns_inverse)


def arrange_back(W: Tensor, perms: Permutations) -> Tensor:
    """The inverse of :func:`arrange`."""
    W = permute(W, perms.rows_inverse, perms.rows, -2)
    return permute(W, perms.columns_inverse, perms.columns)


# ---- weight-centric


def plain_weight(
    W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations, low: torch.dtype | None = None
) -> Tensor:
    """W = R W0 P in the layer's order, W0 (..., m, n), in ``low``, or in the skew parameters' dtype."""
    with precision.full_precision(W0.device):
        R, P = both_blocks(spec, skew_params, low)
        return arrange_back(block_matmul_rows(block_matmul(W0.to(low or skew_params.dtype), P), R), perms)


def _plain_weight_centric(
    x: Tensor, W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations
) -> Tensor:
    return F.linear(x, plain_weight(W0, skew_params, spec, perms, _low(x)).to(x.dtype))


def _low(x: Tensor) -> torch.dtype | None:
    """The dtype of the products that form W for x: a GPU's float32 products take ten times as long."""
    return matmul_dtype(x.dtype) if x.is_cuda else None


class _WeightCentric(Function):
    """Replaces torch's checkpoint: autograd would compute the W-sized products of the gradient in TF32 if that is on."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        autograd.save(ctx, args)
        return _plain_weight_centric(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, W0, skew_params, spec, perms), _ = autograd.saved(ctx)
        needs_x, _, needs_skew, *_ = ctx.needs_input_grad
        with torch.enable_grad():
            leaf = skew_params.detach().requires_grad_(needs_skew)
            W = plain_weight(W0, leaf, spec, perms, _low(x))
        grad_x = grad @ W.detach().to(grad.dtype) if needs_x else None
        grad_skew = None
        if needs_skew:
            grad_W = grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
            with precision.full_precision(W0.device):
                (grad_skew,) = torch.autograd.grad(W, leaf, grad_W.to(W.dtype))
        return grad_x, None, grad_skew, None, None


poet_weight = autograd.recomputed(plain_weight)
"""The same, which saves nothing of W's size for the backward."""
_recomputed_weight_centric = autograd.recomputed(_plain_weight_centric)
_weight_centric = autograd.custom_gradient(_WeightCentric, _plain_weight_centric)


# ---- the cheaper of the two


def linear_flops(tokens: int, spec: RotationSpec, *, input_centric: bool, training: bool = True) -> int:
    """Floating-point operations of a linear layer's matmuls, without the Cayley maps.

    T tokens, W (m, n), blocks of b on both sides. Forward and backward take 4Tmn + 6T(m + n)b input-centric and
    6Tmn + 14mnb weight-centric (four products of mnb form W twice, three are its gradient); forward alone
    2Tmn + 2T(m + n)b and 2Tmn + 4mnb. nn.Linear takes 6Tmn, and 2Tmn forward.
    """
    R, P = spec.R, spec.P
    of_tokens = tokens * (R.num_rotated * R.block + P.num_rotated * P.block)
    of_weight = P.n * R.num_rotated * R.block + R.n * P.num_rotated * P.block
    dense = tokens * R.n * P.n
    if not training:
        return 2 * dense + 2 * (of_tokens if input_centric else of_weight)
    return 4 * dense + 6 * of_tokens if input_centric else 6 * dense + 7 * of_weight


def prefers_input_centric(
    tokens: int, spec: RotationSpec, *, training: bool = True, low_precision: bool = False
) -> bool:
    """Whether rotating the activations is faster than forming W, by the cost model.

    Elements that permutations gather cost time but no operations: with the backward T(2m + 3n) input-centric and 6mn
    weight-centric, without it T(m + n) and 2mn. ``low_precision``: the activations, and so all matmuls except those that form
    W, are 16-bit.
    """
    m, n = spec.R.n * (spec.R.num_rotated > 0), spec.P.n * (spec.P.num_rotated > 0)
    move = _FLOPS_PER_MOVE_LOW if low_precision else _FLOPS_PER_MOVE
    of_input = linear_flops(tokens, spec, input_centric=True, training=training)
    of_input += move * tokens * (2 * m + 3 * n if training else m + n)
    of_weight = linear_flops(tokens, spec, input_centric=False, training=training)
    of_weight += move * (3 if training else 1) * (m * spec.P.n + spec.R.n * n)
    if low_precision:
        of_weight += (_FLOAT32_COST - 1) * linear_flops(0, spec, input_centric=False, training=training)
    return of_input <= of_weight
