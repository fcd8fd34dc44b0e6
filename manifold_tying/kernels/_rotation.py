"""Permuted transposes and two-term Cayley-Neumann blocks, each in one or two kernel launches."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import wrap_triton

# Triton launches on the current device, not on that of its arguments. Builds without CUDA cannot ask for it.
_device_of = torch.cuda.device_of if torch.backends.cuda.is_built() else lambda tensor: nullcontext()

_ALIGNED = 8  # rows of a multiple of 16 bytes
_TILE = (64, 64)  # tokens and columns of a transpose


def to_columns(x: Tensor, place: Tensor) -> Tensor:
    """(n, width) with row place[c] = x[:, c] for x (T, n); zeros pad T to a multiple of 8.

    An empty ``place`` stands for the identity.
    """
    T, n = x.shape
    place = place if len(place) else torch.arange(n, device=x.device)
    x, width = x.contiguous(), -(-T // _ALIGNED) * _ALIGNED
    out = x.new_empty(n, width)
    _launch("permuted_transpose", _grid(width, n), x, place, out, T, n, width, *_TILE)
    return out


def from_columns(v: Tensor, place: Tensor, T: int) -> Tensor:
    """The inverse of :func:`to_columns` for v (n, width): (T, n)."""
    n, width = v.shape
    place = place if len(place) else torch.arange(n, device=v.device)
    out = v.new_empty(T, n)
    _launch("transpose_back", _grid(T, n), v, place, out, T, n, width, *_TILE)
    return out


def cubic_blocks(vectors: Tensor, b: int, dtype: torch.dtype, low: torch.dtype) -> tuple[Tensor, Tensor]:
    """I + 2A + 2A² + A³ (k, b, b) in ``dtype`` for skew A from float32 vectors (k, b(b-1)/2), and A in ``low``.

    The products A² and A³ are in ``low``.
    """
    grid, B = _tiles(len(vectors), b, low)
    skews, blocks = (vectors.new_empty(len(vectors), b, b, dtype=each) for each in (low, dtype))
    squares = torch.empty_like(skews)
    _launch("skew", grid, vectors, skews, b, B)
    _launch("square", grid, skews, squares, b, B)
    _launch("cubic", grid, vectors, skews, squares, blocks, b, B)
    return blocks, skews


def cubic_gradient(skews: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the vectors of :func:`cubic_blocks` from that of the blocks (k, b, b)."""
    k, b, _ = skews.shape
    grid, B = _tiles(k, b, skews.dtype)
    out = skews.new_empty(k, b * (b - 1) // 2, dtype=torch.float32)
    product = torch.empty_like(skews)
    _launch("gradient_product", grid, skews, grad, product, b, B)
    _launch("cubic_gradient", grid, skews, grad, product, out, b, B)
    return out


def _launch(name: str, grid: tuple[int, ...], first: Tensor, *args: Any) -> None:
    from manifold_tying.kernels import _triton_rotation  # when it is needed: Triton is not everywhere

    kernel = getattr(_triton_rotation, name)
    if type(first) not in (Tensor, nn.Parameter):  # torch.compile: the launch becomes part of its graph
        wrap_triton(kernel)[grid](first, *args)
        return
    with _device_of(first):
        kernel[grid](first, *args)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // _TILE[0]), -(-columns // _TILE[1])


def _tiles(k: int, b: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int]:
    """The grid, and the side of a square tile, for products of k matrices (b, b) in ``dtype``."""
    B = 32 if b <= 32 or dtype.itemsize > 2 else 64  # more float32 entries do not fit into a small GPU's shared memory
    return (k, -(-b // B), -(-b // B)), B
