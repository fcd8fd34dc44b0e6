"""The input-centric POET layer, on transposed activations.

To permute the columns of x (T, n) is to move single entries; to permute the rows of xᵀ (n, T) is to move whole rows. So x is
transposed and permuted, on a GPU in one pass. All products take xᵀ as it is: the blocks are one batched product, W0 is another.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manifold_tying import autograd, kernels, precision
from manifold_tying.poet.rotation import (
    Blocks,
    block_matmul,
    block_matmul_rows,
    both_blocks,
    matmul_dtype,
    orthogonal_blocks,
    permute,
    rows_of,
    transposed,
)
from manifold_tying.poet.spec import Permutations, RotationSpec, inverse_order

_CHUNK_TOKENS = 1040  # few enough for a CPU's cache; rows that are a power of two apart would share its sets


def uses_triton(x: Tensor, skew_params: Tensor, spec: RotationSpec) -> bool:
    """Whether :func:`by_activations` has kernels for these; then it is the faster formulation.

    Compiled code, which on a GPU needs Triton anyway, cannot use autograd inside of an operation.
    """
    if skew_params.dtype != torch.float32:
        return False
    if torch.compiler.is_compiling() and not autograd.is_exporting():
        return x.is_cuda and spec.terms == 2 and not autograd.in_transform()
    return kernels.runs_triton(x)


def by_activations(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec, triton: bool
) -> Tensor:
    """x Wᵀ for W = R W0 P and x (T, n), without W; ``rows`` and ``columns`` are the dimensions' places."""
    if not torch.compiler.is_compiling():
        return _by_columns(x, W0, skew_params, rows, columns, spec, triton)
    if triton:
        from manifold_tying.poet.compiled import compiled_linear  # which imports the compiler

        return compiled_linear(x, W0, skew_params, rows, columns, spec)
    return _plain(x, W0, skew_params, rows, columns, spec, triton)


def _plain(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec, _triton: bool
) -> Tensor:
    (of_R, of_P), perms = spec.split(skew_params), Permutations.of(rows, columns)
    return _rotate_out(F.linear(_rotate_in(x, of_P, spec, perms), W0.to(x.dtype)), of_R, spec, perms)


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


def forward(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec, triton: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """y with yᵀ = R W0 P xᵀ, and for the backward W0 P xᵀ for each chunk of tokens, and what :func:`_blocks` keeps."""
    R, P, of_blocks = _blocks(spec, skew_params, x.dtype, triton)
    W, products, rotated = W0.to(x.dtype), [], spec.R.num_rotated

    def part(x: Tensor) -> Tensor:
        u = block_matmul_rows(_to_columns(x, columns, triton), P)
        v = torch.mm(W, u) if triton or R else torch.mm(u.mT, W.mT).mT  # no rows to move: y in its own layout
        # The rows that rotate are all that the gradient of R needs.
        products.append(v if triton or rotated == len(v) else v[:rotated].clone())
        return _from_columns(block_matmul_rows(v, R), rows, len(x), triton)

    return _in_chunks(part, W, x), products, of_blocks


def backward(
    grad: Tensor, args: Sequence[Any], products: list[Tensor], of_blocks: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the skew parameters, from the arguments and the other results of :func:`forward`."""
    x, W0, skew_params, rows, columns, spec, triton = args
    R, P, pull_back = _blocks_again(spec, skew_params, x.dtype, of_blocks)
    W, remaining, sums = W0.to(x.dtype), iter(products), list[Tensor]()

    def part(grad: Tensor, x: Tensor) -> Tensor:
        g = _to_columns(grad, rows, triton)
        outer = _outer(g, next(remaining), R)
        g = torch.mm(W.mT, block_matmul_rows(g, transposed(R)))
        outer += _outer(g, _to_columns(x, columns, triton), P)
        sums[:] = [total.to(skew_params.dtype) + own for total, own in zip(sums, outer, strict=True)] if sums else outer
        return _from_columns(block_matmul_rows(g, transposed(P)), columns, len(x), triton)

    return _in_chunks(part, W, grad, x), pull_back(sums)


def _in_chunks(part: Callable[..., Tensor], W: Tensor, *tokens: Tensor) -> Tensor:
    """The rows that ``part`` computes from each chunk of tokens: on a CPU, the intermediates stay in its cache."""
    T = len(tokens[0])
    if T <= _CHUNK_TOKENS or W.device.type != "cpu":
        return part(*tokens).contiguous()
    y = W.new_empty(0)
    for start in range(0, T, _CHUNK_TOKENS):
        t = slice(start, start + _CHUNK_TOKENS)
        found = part(*(each[t] for each in tokens))
        y = y if start else found.new_empty(T, found.shape[1])
        y[t] = found
    return y


def _to_columns(x: Tensor, place: Tensor, triton: bool) -> Tensor:
    """xᵀ (n, T) with row place[c] = x[:, c] for x (T, n); an empty ``place`` stands for the identity."""
    if triton:
        return kernels.to_columns(x, place)
    return x.mT.contiguous().index_select(0, inverse_order(place)) if len(place) else x.mT


def _from_columns(v: Tensor, place: Tensor, T: int, triton: bool) -> Tensor:
    """The inverse of :func:`_to_columns`."""
    if triton:
        return kernels.from_columns(v, place, T)
    return (v.index_select(0, place) if len(place) else v).mT


class _ByColumns(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with precision.disable_autocast(args[0].device):
            y, products, of_blocks = forward(*args)
        autograd.save(ctx, args, *products, *of_blocks)
        ctx.products = len(products)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        args, kept = autograd.saved(ctx)
        with precision.disable_autocast(grad.device):
            grad_x, grad_skew = backward(grad, args, kept[: ctx.products], kept[ctx.products :])
        return grad_x, None, grad_skew, None, None, None, None


_by_columns = autograd.custom_gradient(_ByColumns, _plain)


def _outer(g: Tensor, x: Tensor, blocks: Blocks) -> Blocks:
    """g_j x_jᵀ, the gradient of G_j in G_j x_j, for g and x (n, T)."""
    return [torch.bmm(g_j, x_j.mT) for g_j, x_j in zip(rows_of(g, blocks), rows_of(x, blocks), strict=True)]


def _runs(spec: RotationSpec, skew_params: Tensor) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Vectors (k, b(b-1)/2) of neighbouring runs of equal blocks, their b, and the number of blocks in each run."""
    start = 0
    for b, neighbours in groupby((*spec.R.runs, *spec.P.runs), key=lambda run: run[1]):
        counts = [k for k, _ in neighbours]
        size = sum(counts) * (b * (b - 1) // 2)
        yield skew_params[start : start + size].view(sum(counts), -1), b, counts
        start += size


def _blocks(
    spec: RotationSpec, skew_params: Tensor, dtype: torch.dtype, triton: bool
) -> tuple[Blocks, Blocks, list[Tensor]]:
    """The blocks of R and P in ``dtype``, and what a GPU keeps: the blocks, and for each group of :func:`_runs` A."""
    low, count = matmul_dtype(dtype), len(spec.R.runs)
    if not triton or spec.terms != 2:
        R, P = ([G.to(dtype) for G in side] for side in both_blocks(spec, skew_params, low))
        return R, P, [*R, *P] if triton else []
    blocks: Blocks = []
    skews: list[Tensor] = []
    for vectors, b, counts in _runs(spec, skew_params):
        of_run, A = kernels.cubic_blocks(vectors, b, dtype, low or torch.float32)
        blocks += of_run.split(counts) if len(counts) > 1 else [of_run]
        skews.append(A)
    return blocks[:count], blocks[count:], [*blocks, *skews]


def _blocks_again(
    spec: RotationSpec, skew_params: Tensor, dtype: torch.dtype, kept: list[Tensor]
) -> tuple[Blocks, Blocks, Callable[[Blocks], Tensor]]:
    """The blocks of :func:`_blocks`, and a function that maps the gradients of R's, then P's to that of the skew parameters."""
    count, both = len(spec.R.runs), len(spec.R.runs) + len(spec.P.runs)
    if kept and spec.terms == 2:
        return kept[:count], kept[count:both], lambda sums: _cubic_gradient(spec, skew_params, sums, kept[both:])
    with torch.enable_grad():
        leaf = skew_params.detach().requires_grad_()
        R, P = both_blocks(spec, leaf, matmul_dtype(dtype))

    def pull_back(sums: Blocks) -> Tensor:
        with precision.full_precision(leaf.device):
            return torch.autograd.grad((*R, *P), leaf, [of.to(leaf.dtype) for of in sums])[0]

    blocks = kept or [G.detach().to(dtype) for G in (*R, *P)]
    return blocks[:count], blocks[count:], pull_back


def _cubic_gradient(spec: RotationSpec, skew_params: Tensor, sums: Blocks, skews: list[Tensor]) -> Tensor:
    """The gradient of the skew parameters by kernels."""
    found = []
    for (_, _, counts), A in zip(_runs(spec, skew_params), skews, strict=True):
        of_run, sums = sums[: len(counts)], sums[len(counts) :]
        grad = of_run[0] if len(of_run) == 1 else torch.cat(of_run)
        found.append(kernels.cubic_gradient(A, grad).flatten())
    return found[0] if len(found) == 1 else torch.cat(found)
