"""Linear layer with W = R W0 P: two formulations, and a cost model that picks the cheaper one.

The rows and columns of W0 are stored in rotation order, so that R and P are block-diagonal. Only x and the result (or W) are
permuted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manifold_tying import autograd, precision
from manifold_tying.poet.rotation import (
    Blocks,
    add_block_outer_,
    block_matmul,
    block_matmul_rows,
    both_blocks,
    matmul_dtype,
    orthogonal_blocks,
    permute,
    permute_into,
    transposed,
)
from manifold_tying.poet.spec import Permutations, RotationSpec

_CHUNK_ENTRIES = 2**21  # size of a chunk of tokens that fits a CPU cache
_MIN_CHUNK_TOKENS = 1024  # each chunk reads all of W0: 180 MB in a layer of 11,008 x 4,096

# Cost model: float32 operations that take as long as moving one entry (also in low precision), and as one float32 operation
# in a bfloat16 layer. Fitted at 18 sizes on CPUs of 0.3 and 1 TFLOP/s. An H200's data sheet gives 100, 600 and 14.
_FLOPS_PER_MOVE, _FLOPS_PER_MOVE_LOW, _FLOAT32_COST = 750, 2700, 12


def poet_linear(
    x: Tensor,
    W0: Tensor,
    skew_params: Tensor,
    spec: RotationSpec,
    perms: Permutations,
    bias: Tensor | None = None,
    *,
    input_centric: bool,
) -> Tensor:
    """x Wᵀ + bias for W = R W0 P: x (..., n), W0 (m, n), bias (m,) to (..., m), in x's dtype or autocast's.

    Input-centric: ((x Pᵀ) W0ᵀ) Rᵀ never forms W; it saves x and x Pᵀ W0ᵀ for the backward. Weight-centric: forms W in the
    skew parameters' dtype, casts it to x's, and forms it again in the backward; it saves x. Both agree to rounding.
    """
    x = x.to(precision.autocast_dtype(x))
    is_compiling = torch.compiler.is_compiling()
    if input_centric:
        flat = x.flatten(0, -2) if x.ndim > 1 else x[None]
        y = (plain_input_centric if is_compiling else _input_centric)(flat, W0, skew_params, spec, perms)
        y = y.view(*x.shape[:-1], len(W0))
    else:
        y = (_recomputed_weight_centric if is_compiling else _weight_centric)(x, W0, skew_params, spec, perms)
    return y if bias is None else y + bias.to(y.dtype)


def poet_weight(W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations) -> Tensor:
    """W = R W0 P in the layer's order, W0 (..., m, n), in the skew parameters' dtype; saves nothing of W's size."""
    return _weight(W0, skew_params, spec, perms)


def arrange(W: Tensor, perms: Permutations) -> Tensor:
    """Permute a matrix (..., m, n) from the layer's order to rotation order."""
    W = permute(W, perms.rows, perms.rows_inverse, -2)
    return permute(W, perms.columns, perms.columns_inverse)


def arrange_back(W: Tensor, perms: Permutations) -> Tensor:
    """The inverse of :func:`arrange`."""
    W = permute(W, perms.rows_inverse, perms.rows, -2)
    return permute(W, perms.columns_inverse, perms.columns)


# ---- weight-centric


def _plain_weight(W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations) -> Tensor:
    with precision.full_precision(W0.device):
        R, P = both_blocks(spec, skew_params)
        return arrange_back(block_matmul_rows(block_matmul(W0.to(skew_params.dtype), P), R), perms)


def _plain_weight_centric(
    x: Tensor, W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations
) -> Tensor:
    return F.linear(x, _plain_weight(W0, skew_params, spec, perms).to(x.dtype))


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
            W = _plain_weight(W0, leaf, spec, perms)
        grad_x = grad @ W.detach().to(grad.dtype) if needs_x else None
        grad_skew = None
        if needs_skew:
            grad_W = grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
            with precision.full_precision(W0.device):
                (grad_skew,) = torch.autograd.grad(W, leaf, grad_W.to(W.dtype))
        return grad_x, None, grad_skew, None, None


# ---- input-centric


def plain_input_centric(x: Tensor, W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations) -> Tensor:
    of_R, of_P = spec.split(skew_params)
    v = F.linear(_rotate_in(x, of_P, spec, perms), W0.to(x.dtype))
    return _rotate_out(v, of_R, spec, perms)


@autograd.recomputed
def _rotate_in(x: Tensor, of_P: Tensor, spec: RotationSpec, perms: Permutations) -> Tensor:
    """x Pᵀ, in the order of W0's stored columns."""
    P = orthogonal_blocks(spec.P, of_P, spec.terms, matmul_dtype(x.dtype))
    return block_matmul(permute(x, perms.columns, perms.columns_inverse), transposed(P))


@autograd.recomputed
def _rotate_out(v: Tensor, of_R: Tensor, spec: RotationSpec, perms: Permutations) -> Tensor:
    """v Rᵀ, in the layer's order."""
    R = orthogonal_blocks(spec.R, of_R, spec.terms, matmul_dtype(v.dtype))
    return permute(block_matmul(v, transposed(R)), perms.rows_inverse, perms.rows)


class _InputCentric(Function):
    """On a CPU, tokens are processed in chunks whose intermediates stay in the cache."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W0: Tensor, skew_params: Tensor, spec: RotationSpec, perms: Permutations
    ) -> Tensor:
        R, P = (transposed(side) for side in both_blocks(spec, skew_params, matmul_dtype(x.dtype)))
        W, rotated = W0.to(x.dtype), spec.R.num_rotated
        y, kept = x.new_empty(len(x), len(W)), x.new_empty(len(x), rotated)
        for t in _chunks(x, W):
            u = block_matmul(permute(x[t], perms.columns, perms.columns_inverse), P)
            if rotated == len(W):
                v = torch.mm(u, W.mT, out=kept[t])
            else:
                v = u @ W.mT
                kept[t] = v[:, :rotated]  # all that the gradient of R needs
            permute_into(y[t], block_matmul(v, R), perms.rows_inverse)
        autograd.save(ctx, (x, W0, skew_params, spec, perms), kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, W0, skew_params, spec, perms), (v,) = autograd.saved(ctx)
        R, P, pull_back = _blocks_with_gradient(spec, skew_params, matmul_dtype(x.dtype))
        W, of_R, of_P, grad_x = W0.to(grad.dtype), _zeros(R), _zeros(P), torch.empty_like(x)
        for t in _chunks(x, W):
            g = permute(grad[t], perms.rows, perms.rows_inverse)
            add_block_outer_(of_R, g, v[t])
            g = block_matmul(g, R) @ W
            add_block_outer_(of_P, g, permute(x[t], perms.columns, perms.columns_inverse))
            permute_into(grad_x[t], block_matmul(g, P), perms.columns_inverse)
        return grad_x, None, pull_back(of_R, of_P) if ctx.needs_input_grad[2] else None, None, None


def _chunks(x: Tensor, W: Tensor) -> Iterator[slice]:
    """Chunks of tokens on a CPU, one chunk elsewhere."""
    size = max(_MIN_CHUNK_TOKENS, _CHUNK_ENTRIES // max(W.shape)) if x.device.type == "cpu" else max(1, len(x))
    return (slice(start, start + size) for start in range(0, len(x), size))


def _blocks_with_gradient(
    spec: RotationSpec, skew_params: Tensor, low: torch.dtype | None = None
) -> tuple[Blocks, Blocks, Callable[[Blocks, Blocks], Tensor]]:
    """Blocks of R and P, and a function that maps their gradients to that of the skew parameters, in full precision."""
    with torch.enable_grad():
        leaf = skew_params.detach().requires_grad_()
        R, P = both_blocks(spec, leaf, low)

    def pull_back(of_R: Blocks, of_P: Blocks) -> Tensor:
        with precision.full_precision(leaf.device):
            return torch.autograd.grad((*R, *P), leaf, (*of_R, *of_P))[0]

    return [G.detach() for G in R], [G.detach() for G in P], pull_back


def _zeros(blocks: Blocks) -> Blocks:
    return [torch.zeros_like(G, memory_format=torch.contiguous_format) for G in blocks]


_weight = autograd.recomputed(_plain_weight)
_recomputed_weight_centric = autograd.recomputed(_plain_weight_centric)
_weight_centric = autograd.custom_gradient(_WeightCentric, _plain_weight_centric)
_input_centric = autograd.custom_gradient(_InputCentric, plain_input_centric)


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
