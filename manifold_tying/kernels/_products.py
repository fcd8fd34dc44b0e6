"""Products of 16-bit matrices with results in float32, and float32 products by sums of them."""

import torch
from torch import Tensor

from manifold_tying import precision
from manifold_tying.kernels._choice import runs_eagerly_on_gpu

ROWS = 4096  # of a sum in float32, in which 2^24 is exact
SMALL = 2**30  # multiplications up to which one float32 product is faster
LARGE_GRAM = 2**34  # and from which a split Gram matrix is


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
    """Whether :func:`split_product` serves for x: eagerly on a CUDA device, if a dtype of what follows has 16 bits."""
    return min(dtype.itemsize for dtype in dtypes) == 2 and runs_eagerly_on_gpu(x)


def split_product(A: Tensor, B: Tensor, parts: int = 2) -> Tensor:
    """A B in float32, without a gradient, by products of bfloat16 matrices that sum to A (n, k) and to B (k, p).

    A part has 8 bits, so the error is about 2^(-8 parts) ‖A‖ ‖B‖. It takes parts (parts + 1) / 2 products, or ``parts`` if one
    of the factors is bfloat16; each is some 15 times faster than one in float32.
    """
    if len(A) * A.shape[1] * B.shape[1] <= SMALL:  # one launch in place of ten
        with precision.full_precision(A.device):
            return A.float() @ B.float()
    right, total = _parts(B, parts), A.new_empty(len(A), B.shape[1], dtype=torch.float32)
    for rows in precision.row_chunks(total):
        left = _parts(A[rows], parts)
        pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if i + j < parts]
        for beta, (a, b) in enumerate(pairs):
            add_product_(total[rows], a, b, beta=min(beta, 1))
    return total


def split_gram(W: Tensor) -> Tensor:
    """WᵀW in float64, to about 2^-26 ‖W‖², by bfloat16 parts h + m + l = W (V, d): hᵀh + X + Xᵀ, X = hᵀm + hᵀl + mᵀ(m/2 + l).

    In a column, h has integers up to 2^6 times a step, so that float32 sums of hᵀh are exact (Ozaki et al., Numerical
    Algorithms 59, 2012): x + grid, with grid = 1.5 2^23 steps, is rounded to a step. A small W is multiplied in float64.
    """
    if W.numel() * W.shape[1] < LARGE_GRAM:
        return precision.gram_in_double(W)
    grid = 1.5 * 2**17 * torch.linalg.vector_norm(W, torch.inf, dim=0, dtype=torch.float32).frexp().exponent.exp2()
    G = W.new_zeros(W.shape[1], W.shape[1], dtype=torch.float64)
    X, product = torch.zeros_like(G, dtype=torch.float32), torch.empty_like(G, dtype=torch.float32)
    for rows in W.split(ROWS):
        x = rows.float()
        h = (x + grid - grid).bfloat16()
        m, l = _parts(x - h, 2)
        G += add_product_(product, h.mT, h, beta=0)
        for a, b in ((h, m), (h, l), (m, m / 2), (m, l)):
            add_product_(X, a.mT, b)
    return G + (X + X.mT)


def _parts(A: Tensor, count: int) -> list[Tensor]:
    parts = [A.to(torch.bfloat16)]
    for _ in range(0 if A.dtype == torch.bfloat16 else count - 1):
        A = A - parts[-1]
        parts.append(A.to(torch.bfloat16))
    return parts
