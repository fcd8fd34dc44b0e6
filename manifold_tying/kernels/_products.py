"""Products of 16-bit matrices with results in float32."""

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
