"""The kernels; importing this file needs Triton."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits, stride, targets, weights, losses, V, z, smoothing, cap,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row: see :func:`manifold_tying.kernels.cross_entropy_`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target, weight = tl.load(targets + row), tl.load(weights + row)
    columns = tl.arange(0, BLOCK)
    # One maximum of all columns but a sum for each: one exponential per logit, one reduction per block.
    largest = -3.4e38  # finite, so that a block of -inf adds 0
    sums = tl.zeros((BLOCK,), tl.float32)
    plain_sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        mask = start + columns < V
        x = tl.load(logits + start + columns, mask=mask, other=-float("inf")).to(tl.float32)
        if CAP:
            x = tl.where(mask, _capped(x, cap), -float("inf"))
        if SMOOTH:
            plain_sums += tl.where(mask, x, 0.0)
        maximum = tl.maximum(largest, tl.max(x, 0))
        sums = sums * tl.exp(largest - maximum) + tl.exp(x - maximum)
        largest = maximum
    total = tl.sum(sums, 0)
    x_target = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    if CAP:
        x_target = _capped(x_target, cap)
    lse = tl.log(total) + largest
    loss = lse - (1 - smoothing) * x_target + z * lse * lse
    if SMOOTH:
        loss -= smoothing / V * tl.sum(plain_sums, 0)
    tl.store(losses + row, tl.where(weight != 0, weight * loss, 0.0))
    if WRITE:
        tl.debug_barrier()  # no thread writes before all have read the target's logit
        for start in range(0, V, BLOCK):
            mask = start + columns < V
            given = tl.load(logits + start + columns, mask=mask, other=-float("inf")).to(tl.float32)
            x = _capped(given, cap) if CAP else given
            p = (1 + 2 * z * lse) * tl.exp(x - largest) / total - smoothing / V
            p -= tl.where(start + columns == target, 1 - smoothing, 0.0)
            if CAP:
                p *= 4 * tl.sigmoid(2 * given / cap) * tl.sigmoid(-2 * given / cap)
            tl.store(
                logits + start + columns, tl.where(weight != 0, weight * p, 0.0).to(logits.dtype.element_ty), mask=mask
            )


@triton.jit
def _capped(x, cap):
    return cap * (2 * tl.sigmoid(2 * x / cap) - 1)
