"""The input-centric POET layer on a GPU, in few kernel launches.

To permute the columns of x (T, n) is to move single entries; to permute the rows of xᵀ (n, T) is to move whole rows. So x is
transposed and permuted in one pass. All products take xᵀ as it is: the blocks are one batched product, W0 is another.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from manifold_tying import autograd, precision
from manifold_tying.kernels import cubic_blocks, cubic_gradient, from_columns, runs_triton, to_columns
from manifold_tying.poet.linear import plain_input_centric
from manifold_tying.poet.rotation import Blocks, both_blocks, matmul_dtype, transposed
from manifold_tying.poet.spec import Permutations, RotationSpec


def is_for_gpu(x: Tensor, skew_params: Tensor, spec: RotationSpec) -> bool:
    """Whether :func:`poet_linear_on_gpu` is for these.

    Compiled code, which on a GPU needs Triton anyway, cannot use autograd inside of an operation.
    """
    if skew_params.dtype != torch.float32:
        return False
    if torch.compiler.is_compiling() and not autograd.is_exporting():
        return x.is_cuda and spec.terms == 2 and not autograd.in_transform()
    return runs_triton(x)


def poet_linear_on_gpu(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec, bias: Tensor | None
) -> Tensor:
    """x Wᵀ + bias as :func:`poet_linear`, where kernels are usable; ``rows`` and ``columns`` are the dimensions' places."""
    x = x.to(precision.autocast_dtype(x))
    flat = x.flatten(0, -2) if x.ndim > 1 else x[None]
    if torch.compiler.is_compiling():
        from manifold_tying.poet.compiled import compiled_linear  # which imports the compiler

        y = compiled_linear(flat, W0, skew_params, rows, columns, spec)
    else:
        y = _by_columns(flat, W0, skew_params, rows, columns, spec)
    y = y.view(*x.shape[:-1], len(W0))
    return y if bias is None else y + bias.to(y.dtype)


def forward(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec
) -> list[Tensor]:
    """y with yᵀ = R W0 P xᵀ, and what the backward needs: W0 P xᵀ, and the blocks of R and P in x's dtype."""
    blocks, skews = _blocks(spec, skew_params, x.dtype)
    R, P = blocks[: len(spec.R.runs)], blocks[len(spec.R.runs) :]
    v = torch.mm(W0.to(x.dtype), _rotated(P, to_columns(x, columns)))
    return [from_columns(_rotated(R, v), rows, len(x)), v, *blocks, *skews]


def backward(
    grad: Tensor,
    x: Tensor,
    W0: Tensor,
    skew_params: Tensor,
    rows: Tensor,
    columns: Tensor,
    spec: RotationSpec,
    kept: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the skew parameters."""
    (v, *kept), sides = kept, (len(spec.R.runs), len(spec.R.runs) + len(spec.P.runs))
    R, P, skews = kept[: sides[0]], kept[sides[0] : sides[1]], kept[sides[1] :]
    g = to_columns(grad, rows)
    of_R = _outer(g, v, R)
    g = torch.mm(W0.to(x.dtype).mT, _rotated(transposed(R), g))
    of_P = _outer(g, to_columns(x, columns), P)
    grad_x = from_columns(_rotated(transposed(P), g), columns, len(x))
    return grad_x, _gradient(spec, skew_params, x.dtype, of_R + of_P, skews)


class _ByColumns(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        # Triton launches on the current device, not on that of its arguments.
        with torch.cuda.device_of(args[0]), precision.disable_autocast(args[0].device):
            y, *kept = forward(*args)
        autograd.save(ctx, args, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, W0, skew_params, rows, columns, spec), kept = autograd.saved(ctx)
        with torch.cuda.device_of(grad), precision.disable_autocast(grad.device):
            grad_x, grad_skew = backward(grad, x, W0, skew_params, rows, columns, spec, kept)
        return grad_x, None, grad_skew, None, None, None


def _plain(x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec) -> Tensor:
    return plain_input_centric(x, W0, skew_params, spec, Permutations.of(rows, columns))


_by_columns = autograd.custom_gradient(_ByColumns, _plain)


def _rotated(blocks: Blocks, x: Tensor) -> Tensor:
    """G_j x_j block by block for x (n, T); the remaining rows are unchanged."""
    parts = [torch.bmm(G, x_j).flatten(0, 1) for G, x_j in zip(blocks, _rows(x, blocks), strict=True)]
    done = sum(map(len, parts))
    parts += [x[done:]] if done < len(x) else []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _outer(g: Tensor, x: Tensor, blocks: Blocks) -> Blocks:
    """g_j x_jᵀ, the gradient of G_j in G_j x_j, for g and x (n, T)."""
    return [torch.bmm(g_j, x_j.mT) for g_j, x_j in zip(_rows(g, blocks), _rows(x, blocks), strict=True)]


def _rows(x: Tensor, blocks: Blocks) -> Iterator[Tensor]:
    """For each run of blocks, its rows of x (n, T) as (k, b, T)."""
    start = 0
    for G in blocks:
        k, b, _ = G.shape
        yield x[start : start + k * b].unflatten(0, (k, b))
        start += k * b


def _runs(spec: RotationSpec, skew_params: Tensor) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Vectors (k, b(b-1)/2) of neighbouring runs of equal blocks, their b, and the number of blocks in each run."""
    merged: list[tuple[list[int], int]] = []
    for k, b in (*spec.R.runs, *spec.P.runs):
        if merged and merged[-1][1] == b:
            merged[-1][0].append(k)
        else:
            merged.append(([k], b))
    start = 0
    for counts, b in merged:
        size = sum(counts) * (b * (b - 1) // 2)
        yield skew_params[start : start + size].view(sum(counts), -1), b, counts
        start += size


def _blocks(spec: RotationSpec, skew_params: Tensor, dtype: torch.dtype) -> tuple[Blocks, list[Tensor]]:
    """The blocks of R, then P, in ``dtype``; for each group of :func:`_runs` the skew matrices."""
    low = matmul_dtype(dtype)
    if spec.terms != 2:
        R, P = both_blocks(spec, skew_params, low)
        return [G.to(dtype) for G in (*R, *P)], []
    blocks: Blocks = []
    skews: list[Tensor] = []
    for vectors, b, counts in _runs(spec, skew_params):
        of_run, A = cubic_blocks(vectors, b, dtype, low or torch.float32)
        blocks += of_run.split(counts) if len(counts) > 1 else [of_run]
        skews.append(A)
    return blocks, skews


def _gradient(
    spec: RotationSpec, skew_params: Tensor, dtype: torch.dtype, of_blocks: Blocks, skews: list[Tensor]
) -> Tensor:
    """The gradient of the skew parameters from those of the blocks of R, then P."""
    if spec.terms != 2:
        with torch.enable_grad():
            leaf = skew_params.detach().requires_grad_()
            R, P = both_blocks(spec, leaf, matmul_dtype(dtype))
        with precision.full_precision(leaf.device):
            weights = [of.to(G.dtype) for of, G in zip(of_blocks, (*R, *P), strict=True)]
            return torch.autograd.grad((*R, *P), leaf, weights)[0]
    found = []
    for (_, _, counts), A in zip(_runs(spec, skew_params), skews, strict=True):
        of_run, of_blocks = of_blocks[: len(counts)], of_blocks[len(counts) :]
        grad = of_run[0] if len(of_run) == 1 else torch.cat(of_run)
        found.append(cubic_gradient(A, grad).flatten())
    return found[0] if len(found) == 1 else torch.cat(found)
