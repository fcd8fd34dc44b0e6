"""Products of 16-bit matrices with results in float32, and float32 products by sums of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manifold_tying import precision
from manifold_tying.kernels._choice import runs_eagerly_on_gpu, runs_triton

BLOCK = 1024  # columns of a program
ROWS = 1024  # of an exact sum: products of integers up to 2^7, in float32


def add_product_(total: Tensor, A: Tensor, B: Tensor, beta: float = 1.0) -> Tensor:
    """total <- beta total + A B, in place and without a gradient; beta is 1, or 0 for a total without values yet.

    A (n, k) and B (k, p) have the same dtype. If it is not that of total (n, p), the product is rounded to it and then added;
    a CUDA device adds 16-bit products to a float32 total without this rounding, in one kernel.
    """
    if A.dtype == total.dtype:
        return total.addmm_(A, B, beta=beta)
    if total.dtype == torch.float32 and A.dtype.itemsize == 2 and runs_eagerly_on_gpu(A):
        return torch.addmm(total, A, B, out_dtype=torch.float32, beta=beta, out=total)
    for rows in precision.row_chunks(total):  # a block of rows at a time, which on a CPU stays in its cache
        product = A[rows] @ B
        total[rows] = product if beta == 0 else total[rows] + product
    return total


def splits(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether :func:`split_product` serves for x: eagerly on a CUDA device, if one of these dtypes of what follows has 16 bits.

    bfloat16 products are some 15 times faster than float32 products there, so two to six of them are faster than one.
    """
    return min(dtype.itemsize for dtype in dtypes) == 2 and runs_eagerly_on_gpu(x)


def split_product(A: Tensor, B: Tensor, parts: int = 2, out: Tensor | None = None) -> Tensor:
    """A B in float32, without a gradient, by a product of bfloat16 matrices: parts that sum to A (n, k), and to B (k, p).

    A part has 8 bits, so the error is about 2^(-8 parts) ‖A‖ ‖B‖. The inner dimension grows to parts (parts + 1) / 2 times k,
    or ``parts`` times if one of the factors is bfloat16. ``out`` gets the result, rounded to its dtype.
    """
    a, b = (1 if factor.dtype == torch.bfloat16 else parts for factor in (A, B))
    pairs = [(i, j) for i in range(a) for j in range(b) if i + j < parts]
    # The largest product comes last: tensor cores round sums towards 0 (Fasi et al., PeerJ Computer Science 7:e330, 2021).
    left, right = zip(*reversed(pairs), strict=True)
    factor = _beside(B.mT, right).mT
    out = A.new_empty(len(A), B.shape[1], dtype=torch.float32) if out is None else out
    for rows in precision.row_chunks(out):
        multiply(_beside(A[rows], left), factor, out[rows])
    return out


def split_gram(W: Tensor) -> Tensor:
    """WᵀW in float64, to about 2^-26 ‖W‖², by bfloat16 parts h + m + l = W (V, d): hᵀh + mᵀm + X + Xᵀ with X = hᵀm + (h + m)ᵀl.

    h is a multiple of 2^-7 to 2^-6 of its column's largest entry, so that sums of 1,024 rows of hᵀh are exact (Ozaki et al.,
    Numerical Algorithms 59, 2012). In the inverse of WᵀW an error counts cond(W)² times.
    """
    V, d = W.shape
    largest = torch.linalg.vector_norm(W, torch.inf, dim=0, dtype=torch.float32)
    grid = 3 * 2.0**15 * largest.frexp().exponent.exp2()  # x + grid is rounded to 2^-7 of the power of two above the largest x
    G, X = (W.new_zeros(d, d, dtype=dtype) for dtype in (torch.float64, torch.float32))
    whole = V - V % ROWS
    for rows in filter(len, (*W[:whole].split(max(1, 2**14 // d) * ROWS), W[whole:])):
        parts = split_parts(rows.contiguous(), (2, 2, 1, 0, 0), min(ROWS, len(rows)), grid)
        for own in (parts[:, 3], parts[:, 2]):
            G += multiply(own.mT, own).sum(0, dtype=G.dtype)
        X += multiply(parts[:, 2:].flatten(1, 2).mT, parts[:, :3].flatten(1, 2)).sum(0)
    return G + (X + X.mT)


def multiply(A: Tensor, B: Tensor, out: Tensor | None = None) -> Tensor:
    """A B in float32 of bfloat16 matrices, or of batches of them."""
    if out is not None and out.dtype != torch.float32:
        return out.copy_(multiply(A, B))
    if A.is_cuda:
        return (torch.mm if A.ndim == 2 else torch.bmm)(A, B, out_dtype=torch.float32, out=out)
    return torch.matmul(A.float(), B.float(), out=out)


def _beside(A: Tensor, order: Sequence[int]) -> Tensor:
    """The parts of A (n, k) in this order, beside one another: (n, len(order) k), column-major if A is."""
    if A.mT.is_contiguous():
        return split_parts(A.mT, order, A.shape[1]).flatten(0, 2).mT
    return split_parts(A.contiguous(), order).flatten(1)


def split_parts(x: Tensor, order: Sequence[int], group: int = 1, grid: Tensor | None = None) -> Tensor:
    """The bfloat16 parts of x (rows, columns) in this order, for each group of rows: (groups, len(order), group, columns).

    A part is the rounding of what its predecessors leave; the first is rounded like x + grid, if there is one.
    """
    (rows, columns), groups, blocks = x.shape, len(x) // max(1, group), -(-x.shape[1] // BLOCK)
    if runs_triton(x):
        from manifold_tying.kernels._triton_products import split  # Triton is optional

        out = x.new_empty(groups, len(order), group, columns, dtype=torch.bfloat16)
        options = {"GRID": grid is not None, "ORDER": tuple(order), "PARTS": max(order) + 1, "BLOCK": BLOCK}
        with torch.cuda.device_of(x):
            split[(rows * blocks,)](x, x if grid is None else grid, out, group, columns, blocks, **options)
        return out
    parts: list[Tensor] = []
    for _ in range(max(order) + 1):
        parts.append((x if grid is None or parts else x + grid - grid).to(torch.bfloat16))
        x = x - parts[-1]
    return torch.stack([parts[i].view(groups, group, columns) for i in order], 1)
