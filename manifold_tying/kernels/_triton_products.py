"""The Triton kernel of split products. Triton compiles it for a GPU, or interprets it on a CPU if TRITON_INTERPRET=1."""

import triton
import triton.language as tl


@triton.jit
def split(
    x, grid, parts, group, columns, blocks,
    GRID: tl.constexpr, ORDER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`manifold_tying.kernels._products.split_parts`; a program has a block of columns of a row."""
    row, c = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(x + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    for p in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        if GRID and p == 0:
            step = tl.load(grid + c, mask=c < columns, other=0.0)
            part = ((rest + step) - step).to(tl.bfloat16)
        for s in tl.static_range(len(ORDER)):
            if ORDER[s] == p:
                place = (row // group * len(ORDER) + s) * group + row % group
                tl.store(parts + place * columns + c, part, mask=c < columns)
        rest -= part.to(tl.float32)
