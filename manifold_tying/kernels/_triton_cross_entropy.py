"""The kernels; importing this file needs Triton."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(logits, stride, targets, losses, V, ignore_index, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each row: see :func:`manifold_tying.kernels.cross_entropy_`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    columns = tl.arange(0, BLOCK)
    # One maximum of all columns but a sum for each: one exponential per logit, one reduction per block.
    largest = -3.4e38  # finite, so that a block of -inf adds 0
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < V, other=-float("inf")).to(tl.float32)
        maximum = tl.maximum(largest, tl.max(x, 0))
        sums = sums * tl.exp(largest - maximum) + tl.exp(x - maximum)
        largest = maximum
    total = tl.sum(sums, 0)
    x_target = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(counted, tl.log(total) + largest - x_target, 0.0))
    if WRITE:
        tl.debug_barrier()  # no thread writes before all have read the target's logit
        for start in range(0, V, BLOCK):
            mask = start + columns < V
            x = tl.load(logits + start + columns, mask=mask, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - largest) / total - tl.where(start + columns == target, 1.0, 0.0)
            tl.store(logits + start + columns, tl.where(counted, p, 0.0).to(logits.dtype.element_ty), mask=mask)
