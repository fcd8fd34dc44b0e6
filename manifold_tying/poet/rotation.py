"""Orthogonal blocks from skew parameters, products with them, and their deviation from orthogonality."""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from manifold_tying import autograd, kernels, linalg, precision
from manifold_tying.poet.spec import BlockSpec, RotationSpec, Terms

Blocks = list[Tensor]
"""Blocks of one side: a tensor (..., k, b, b) per run of equal blocks; at most two runs, the second of one block."""

Side = tuple[Blocks, Tensor]
"""Blocks of R or P, and the dimensions that they rotate, in order."""


def orthogonal_blocks(side: BlockSpec, skew_params: Tensor, terms: Terms, low: torch.dtype | None = None) -> Blocks:
    """Blocks of one side from (..., num_params), in its dtype; zeros give exactly the identity. (POET, equation 6.)

    Differentiable to any order. ``low`` is the ``matmul_dtype`` of :func:`linalg.cayley_neumann`.
    """
    return [orthogonal(v, b, terms, low) for v, b in side.split(skew_params)]


def orthogonal(vectors: Tensor, b: int, terms: Terms, low: torch.dtype | None = None) -> Tensor:
    """Orthogonal matrices (..., b, b) from the b(b-1)/2 entries above the diagonal of skew ones."""
    if terms == 2 and low is not None and vectors.dtype == torch.float32 and kernels.runs_triton(vectors):
        blocks: Tensor = _two_terms(vectors.flatten(0, -2), b, low).unflatten(0, vectors.shape[:-1])
        return blocks
    A = linalg.skew(vectors, b)
    if terms == "exp":
        return cast(Tensor, torch.linalg.matrix_exp(2 * A))
    return linalg.cayley(A) if terms is None else linalg.cayley_neumann(A, terms, matmul_dtype=low)


class _TwoTerms(Function):
    """By kernels, which add up in float32."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, b: int, low: torch.dtype) -> Tensor:
        blocks, A = kernels.cubic_blocks(vectors.contiguous(), b, low, low)
        autograd.save(ctx, (vectors, b, low), A)
        return blocks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, (A,) = autograd.saved(ctx)
        return kernels.cubic_gradient(A, grad.contiguous()), None, None


def _plain_two_terms(vectors: Tensor, b: int, low: torch.dtype) -> Tensor:
    return linalg.cayley_neumann(linalg.skew(vectors, b), 2, matmul_dtype=low).to(low)


_two_terms = autograd.custom_gradient(_TwoTerms, _plain_two_terms)


def both_blocks(spec: RotationSpec, skew_params: Tensor, low: torch.dtype | None = None) -> tuple[Blocks, Blocks]:
    """Blocks of R and of P; ``low`` is the matmul dtype of :func:`orthogonal_blocks`."""
    of_R, of_P = spec.split(skew_params)
    return orthogonal_blocks(spec.R, of_R, spec.terms, low), orthogonal_blocks(spec.P, of_P, spec.terms, low)


def matmul_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The matmul dtype of the Cayley maps whose blocks multiply activations in ``dtype``; float16 lacks the range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else None


def transposed(blocks: Blocks) -> Blocks:
    """G_jᵀ for each block."""
    return [G.mT for G in blocks]


def block_matmul_rows(x: Tensor, blocks: Blocks) -> Tensor:
    """G_j x_j block by block, x (..., n, T), blocks with the same leading dimensions; remaining rows are unchanged."""
    if not blocks:
        return x
    pairs, done = list(zip(blocks, rows_of(x, blocks), strict=True)), sum(G.shape[-3] * G.shape[-1] for G in blocks)
    if x.is_cpu and x.ndim == 2 and not autograd.is_tracing() and (len(blocks) > 1 or done < len(x)):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)  # concatenation would copy it once more
        for (G, x_j), y_j in zip(pairs, rows_of(y, blocks), strict=True):
            torch.bmm(G.to(x.dtype), x_j, out=y_j)
        y[done:] = x[done:]
        return y
    product = torch.bmm if x.ndim == 2 else torch.matmul
    parts = [product(G.to(x.dtype), x_j).flatten(-3, -2) for G, x_j in pairs]
    parts += [x[..., done:, :]] if done < x.shape[-2] else []
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def block_matmul(x: Tensor, blocks: Blocks) -> Tensor:
    """x_j G_j block by block, x (..., T, n); remaining columns are unchanged."""
    return block_matmul_rows(x.mT, transposed(blocks)).mT


def rows_of(x: Tensor, blocks: Blocks) -> Iterator[Tensor]:
    """For each run of blocks, its rows of x (..., n, T) as a view (..., k, b, T)."""
    start = 0
    for G in blocks:
        k, b = G.shape[-3], G.shape[-1]
        yield x[..., start : start + k * b, :].unflatten(-2, (k, b))
        start += k * b


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.dim = dim
        return _gather(x, order, inverse, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        return permute(grad, inverse, order, ctx.dim), None, None, None


def _gather(x: Tensor, order: Tensor, inverse: Tensor, dim: int) -> Tensor:
    if order.ndim > 1:  # an order for each matrix
        return torch.gather(x, dim, order.unsqueeze(-3 - dim).expand_as(x))
    if dim == -2:
        return x.index_select(-2, order)
    return torch.gather(x, -1, order.expand(*x.shape[:-1], -1))  # half the time of index_select on a CPU


_permute = autograd.custom_gradient(_Permute, _gather, differentiable=True)


def permute(x: Tensor, order: Tensor, inverse: Tensor, dim: int = -1) -> Tensor:
    """Permute the last dimension of x (or the rows, dim=-2); an empty order means none. The backward gathers, too."""
    return _permute(x, order, inverse, dim) if order.numel() else x


def rotated_columns(x: Tensor, blocks: Blocks, order: Tensor) -> Tensor:
    """x P for x (T, n), given P's blocks and dimensions; without a gradient."""
    return x.index_copy(-1, order, block_matmul(x.index_select(-1, order), blocks)) if len(order) else x


def rotated_rows(x: Tensor, blocks: Blocks, order: Tensor) -> Tensor:
    """R x for x (n, T)."""
    return x.index_copy(-2, order, block_matmul_rows(x.index_select(-2, order), blocks)) if len(order) else x


@torch.no_grad()
def deviation(spec: RotationSpec, skew_params: Tensor) -> float:
    """The largest ‖GᵀG - I‖₂ of the blocks of R and P, or a little more; infinite if one is not finite."""
    worst = skew_params.new_zeros(())
    with precision.full_precision(skew_params.device):
        for G in (G for side in both_blocks(spec, skew_params) for G in side):
            D = precision.gram(G) - precision.eye_like(G)
            # ‖D²‖_F^(1/2) bounds ‖D‖₂; D is an even function of a skew matrix, so its eigenvalues are double.
            worst = torch.maximum(worst, (torch.linalg.matrix_norm(D @ D) / 2**0.5).sqrt().max())
    return float(worst.nan_to_num(math.inf))
