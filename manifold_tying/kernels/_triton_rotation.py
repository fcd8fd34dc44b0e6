"""Triton kernels of a POET layer: permuted transposes, and the blocks of a two-term Cayley-Neumann map with their gradient.

Triton compiles them for a GPU, or interprets them on a CPU if TRITON_INTERPRET=1.
"""

import triton
import triton.language as tl


@triton.jit
def permuted_transpose(x, place, out, T, n, width, BT: tl.constexpr, BC: tl.constexpr):
    """out[place[c], t] = x[t, c] for x (T, n), and 0 for T <= t < width."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tile = tl.load(x + t[:, None] * n + c[None, :], mask=(t < T)[:, None] & (c < n)[None, :], other=0.0)
    row = tl.load(place + c, mask=c < n, other=0)
    tl.store(out + row[:, None] * width + t[None, :], tl.trans(tile), mask=(c < n)[:, None] & (t < width)[None, :])


@triton.jit
def transpose_back(v, place, out, T, n, width, BT: tl.constexpr, BC: tl.constexpr):
    """out[t, c] = v[place[c], t] for v (n, width)."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.load(place + c, mask=c < n, other=0)
    tile = tl.trans(tl.load(v + row[:, None] * width + t[None, :], mask=(c < n)[:, None] & (t < T)[None, :]))
    tl.store(out + t[:, None] * n + c[None, :], tile, mask=(t < T)[:, None] & (c < n)[None, :])


@triton.jit
def _at(matrix, i, j, b):
    return tl.load(matrix + i * b + j, mask=(i < b) & (j < b), other=0.0)


@triton.jit
def _tile(b, B: tl.constexpr):
    """Where this program's matrix (b, b) starts, and its rows (B, 1) and columns (1, B)."""
    rows = tl.program_id(1) * B + tl.arange(0, B)[:, None]
    columns = tl.program_id(2) * B + tl.arange(0, B)[None, :]
    return tl.program_id(0).to(tl.int64) * b * b, rows, columns


@triton.jit
def _place(rows, columns, b):
    """Where the entry above the diagonal stands in this program's vector, in memory."""
    start = tl.program_id(0).to(tl.int64) * (b * (b - 1) // 2)
    return start + rows * (2 * b - rows - 1) // 2 + columns - rows - 1


@triton.jit
def skew(vectors, out, b, B: tl.constexpr):
    """A (k, b, b) from its entries above the diagonal, row by row; a program writes a tile and its mirror image."""
    if tl.program_id(1) > tl.program_id(2):
        return
    start, rows, columns = _tile(b, B)
    above = (rows < columns) & (columns < b)
    a = tl.load(vectors + _place(rows, columns, b), mask=above, other=0.0).to(out.dtype.element_ty)
    tl.store(out + start + rows * b + columns, a, mask=(rows <= columns) & (columns < b))
    tl.store(out + start + columns * b + rows, -a, mask=above)


@triton.jit
def square(skews, out, b, B: tl.constexpr):
    """A²."""
    start, rows, columns = _tile(b, B)
    skews += start
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, b, B):
        inner = first + tl.arange(0, B)
        left, right = _at(skews, rows, inner[None, :], b), _at(skews, inner[:, None], columns, b)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + start + rows * b + columns, total.to(out.dtype.element_ty), mask=(rows < b) & (columns < b))


@triton.jit
def cubic(vectors, skews, squares, out, b, B: tl.constexpr):
    """I + 2A + 2A² + A³, the term 2A in the precision of the vectors."""
    start, rows, columns = _tile(b, B)
    skews += start
    squares += start
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, b, B):
        inner = first + tl.arange(0, B)
        left, right = _at(skews, rows, inner[None, :], b), _at(squares, inner[:, None], columns, b)
        total = tl.dot(left, right, total, input_precision="ieee")
    a = tl.load(vectors + _place(rows, columns, b), mask=(rows < columns) & (columns < b), other=0.0)
    a -= tl.load(vectors + _place(columns, rows, b), mask=(columns < rows) & (rows < b), other=0.0)
    total += 2 * (a + _at(squares, rows, columns, b).to(tl.float32)) + tl.where(rows == columns, 1.0, 0.0)
    tl.store(out + start + rows * b + columns, total.to(out.dtype.element_ty), mask=(rows < b) & (columns < b))


@triton.jit
def gradient_product(skews, grad, out, b, B: tl.constexpr):
    """P = A (Ḡ - Ḡᵀ)."""
    start, rows, columns = _tile(b, B)
    skews += start
    grad += start
    total = tl.zeros((B, B), tl.float32)
    for first in range(0, b, B):
        inner = first + tl.arange(0, B)
        g, transposed = _at(grad, inner[:, None], columns, b), _at(grad, columns, inner[:, None], b)
        right = (g.to(tl.float32) - transposed.to(tl.float32)).to(skews.dtype.element_ty)
        total = tl.dot(_at(skews, rows, inner[None, :], b), right, total, input_precision="ieee")
    tl.store(out + start + rows * b + columns, total.to(out.dtype.element_ty), mask=(rows < b) & (columns < b))


@triton.jit
def _inside(grad, product, i, j, b):
    """Entries (i, j) of P + Pᵀ/2 - 2(Ḡ + Ḡᵀ)."""
    p = _at(product, i, j, b).to(tl.float32) + 0.5 * _at(product, j, i, b).to(tl.float32)
    return (p - 2 * (_at(grad, i, j, b).to(tl.float32) + _at(grad, j, i, b).to(tl.float32))).to(
        product.dtype.element_ty
    )


@triton.jit
def cubic_gradient(skews, grad, product, out, b, B: tl.constexpr):
    """The vectors' gradient, 2(2K + Z - Zᵀ) above the diagonal: 2K = Ḡ - Ḡᵀ and 2Z = A (P + Pᵀ/2 - 2(Ḡ + Ḡᵀ))."""
    if tl.program_id(1) > tl.program_id(2):
        return
    start, rows, columns = _tile(b, B)
    skews += start
    grad += start
    product += start
    total = tl.zeros((B, B), tl.float32)  # 2Z - 2Zᵀ
    for first in range(0, b, B):
        inner = first + tl.arange(0, B)
        across, down = inner[None, :], inner[:, None]
        a, inside = _at(skews, rows, across, b), _inside(grad, product, down, columns, b)
        total = tl.dot(a, inside, total, input_precision="ieee")
        a, inside = _at(skews, down, columns, b), _inside(grad, product, across, rows, b)
        total = tl.dot(inside, a, total, input_precision="ieee")  # since Aᵀ = -A
    total += 2 * (_at(grad, rows, columns, b).to(tl.float32) - _at(grad, columns, rows, b).to(tl.float32))
    tl.store(out + _place(rows, columns, b), total, mask=(rows < columns) & (columns < b))
