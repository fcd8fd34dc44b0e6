"""Products of 16-bit matrices with results in float32, and float32 products by sums of them."""

import torch
from torch import Tensor

from manifold_tying import precision
from manifold_tying.kernels._choice import runs_eagerly_on_gpu, runs_triton

BLOCK, ROWS = 1024, 8192  # columns of a program; rows of a sum in float32
SMALL, LARGE_GRAM = (
    2**30,
    2**34,
)  # multiplications up to which float32 products are faster, and from which split_gram is


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
        total[rows] = A[rows] @ B if beta == 0 else total[rows] + A[rows] @ B
    return total


def splits(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether :func:`split_product` serves for x: eagerly on a CUDA device, if a dtype of what follows has 16 bits."""
    return min(dtype.itemsize for dtype in dtypes) == 2 and runs_eagerly_on_gpu(x)


def split_product(A: Tensor, B: Tensor, parts: int = 2) -> Tensor:
    """A B in float32, without a gradient, by a product of bfloat16 matrices: parts that sum to A (n, k), and to B (k, p).

    A part has 8 bits, so the error is about 2^(-8 parts) ‖A‖ ‖B‖. The inner dimension grows to parts (parts + 1) / 2 times k,
    or ``parts`` times if one of the factors is bfloat16, but such products are some 15 times faster than those in float32.
    """
    if len(A) * A.shape[1] * B.shape[1] <= SMALL:  # one launch in place of three
        with precision.full_precision(A.device):
            return A.float() @ B.float()
    a, b = (1 if factor.dtype == torch.bfloat16 else parts for factor in (A, B))
    pairs = [(i, j) for i in range(a) for j in range(b) if i + j < parts]
    # The largest product comes last: tensor cores round sums towards 0 (Fasi et al., PeerJ Computer Science 7:e330, 2021).
    left, right = zip(*reversed(pairs), strict=True)
    factor, product = _beside(B.mT, right).mT, A.new_empty(len(A), B.shape[1], dtype=torch.float32)
    for rows in precision.row_chunks(product):
        multiply(_beside(A[rows], left), factor, product[rows])
    return product


def split_gram(W: Tensor) -> Tensor:
    """WᵀW in float64, to about 2^-26 ‖W‖², by bfloat16 parts h + m + l = W (V, d): hᵀh + mᵀm + X + Xᵀ with X = hᵀm + (h + m)ᵀl.

    In a column, h has integers up to 2^7 times a step, so that float32 sums of hᵀh hardly round (Ozaki et al., Numerical
    Algorithms 59, 2012): x + grid, with grid = 1.5 2^23 steps, is rounded to a step. A small W is multiplied in float64.
    """
    if W.numel() * W.shape[1] < LARGE_GRAM:
        return precision.gram_in_double(W)
    grid = 1.5 * 2**16 * torch.linalg.vector_norm(W, torch.inf, dim=0, dtype=torch.float32).frexp().exponent.exp2()
    G, X = (W.new_zeros(W.shape[1], W.shape[1], dtype=dtype) for dtype in (torch.float64, torch.float32))
    order = (1, 0, 0) if W.dtype == torch.bfloat16 else (2, 2, 1, 0, 0)  # l is 0 then
    for rows in W.split(ROWS):
        (parts,) = split_parts(rows.contiguous(), order, len(rows), grid)
        for own in (parts[-2], parts[-3]):
            G += multiply(own.mT, own)
        X += multiply(parts[2 - len(order) :].flatten(0, 1).mT, parts[:-2].flatten(0, 1))
    return G + (X + X.mT)


def multiply(A: Tensor, B: Tensor, out: Tensor | None = None) -> Tensor:
    """A B in float32 of bfloat16 matrices."""
    if A.is_cuda:
        return torch.mm(A, B, out_dtype=torch.float32, out=out)
    return torch.matmul(A.float(), B.float(), out=out)


def _beside(A: Tensor, order: tuple[int, ...]) -> Tensor:
    """The parts of A (n, k) in this order, beside one another: (n, len(order) k), column-major if A is."""
    if A.mT.is_contiguous():
        return split_parts(A.mT, order, A.shape[1]).flatten(0, 2).mT
    return split_parts(A.contiguous(), order).flatten(1)


def split_parts(x: Tensor, order: tuple[int, ...], group: int = 1, grid: Tensor | None = None) -> Tensor:
    """The bfloat16 parts of x (rows, columns) in this order, for each group of rows: (groups, len(order), group, columns).

    A part is the rounding of what its predecessors leave; the first is rounded as in x + grid, if there is one.
    """
    out = x.new_empty(len(x) // max(1, group), len(order), group, x.shape[1], dtype=torch.bfloat16)
    if runs_triton(x):
        from manifold_tying.kernels._triton_products import split  # Triton is optional

        tiles = len(x), -(-x.shape[1] // BLOCK)
        with torch.cuda.device_of(x):
            split[tiles](x, x if grid is None else grid, out, group, x.shape[1], grid is not None, order, BLOCK)
        return out
    parts = [(x if grid is None else x + grid - grid).to(out.dtype)]
    for _ in range(max(order)):
        x = x - parts[-1]
        parts.append(x.to(out.dtype))
    return torch.stack([parts[i].view_as(out[:, 0]) for i in order], 1)
