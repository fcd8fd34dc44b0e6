"""The Triton kernel of split products. Triton compiles it for a GPU, or interprets it on a CPU if TRITON_INTERPRET=1."""

import triton
import triton.language as tl


@triton.jit
def split(x, grid, parts, group, columns, GRID: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`manifold_tying.kernels._products.split_parts`, of up to three parts."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(x + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    step = tl.load(grid + c, mask=(c < columns) & GRID, other=0.0)
    for p in tl.static_range(3):
        part = (rest + step - step).to(tl.bfloat16)
        for s in tl.static_range(len(ORDER)):
            if ORDER[s] == p:
                place = (row // group * len(ORDER) + s) * group + row % group
                tl.store(parts + place * columns + c, part, mask=c < columns)
        rest, step = rest - part.to(tl.float32), 0.0
