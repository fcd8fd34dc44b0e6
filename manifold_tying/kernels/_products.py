"""Products of 16-bit matrices with results in float32, and float32 products by sums of them."""

import torch
from torch import Tensor

from manifold_tying import precision
from manifold_tying.kernels._choice import runs_eagerly_on_gpu


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


def split_product(A: Tensor, B: Tensor, parts: int = 2) -> Tensor:
    """A B in float32, without a gradient, by products of bfloat16 matrices that sum to A (n, k) and to B (k, p).

    A part has 8 bits, so the error is about 2^(-8 parts) ‖A‖ ‖B‖. It takes parts (parts + 1) / 2 products, or ``parts`` if one
    of the factors is bfloat16.
    """
    left, right = _parts(A, parts), _parts(B, parts)
    total = torch.empty(len(A), B.shape[1], dtype=torch.float32, device=A.device)
    pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if i + j < parts]
    for beta, (a, b) in enumerate(pairs):
        add_product_(total, a, b, beta=min(beta, 1))
    return total


def _parts(A: Tensor, count: int) -> list[Tensor]:
    parts = [A.to(torch.bfloat16)]
    for _ in range(0 if A.dtype == torch.bfloat16 else count - 1):
        A = A - parts[-1]
        parts.append(A.to(torch.bfloat16))
    return parts
