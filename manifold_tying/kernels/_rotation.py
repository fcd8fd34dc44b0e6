"""Permuted transposes and two-term Cayley-Neumann blocks, each in one or two kernel launches."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 8  # rows of a multiple of 16 bytes
_TILE = (64, 64)  # tokens and columns of a transpose


def aligned(T: int) -> int:
    """T rounded up to what products of 16-bit floats need to be fast."""
    return -(-T // _ALIGNED) * _ALIGNED


def to_columns(x: Tensor, place: Tensor) -> Tensor:
    """(n, width) with row place[c] = x[:, c] for x (T, n); zeros follow up to :func:`aligned`.

    An empty ``place`` stands for the identity.
    """
    T, n = x.shape
    place = place if len(place) else torch.arange(n, device=x.device)
    x, width = x.contiguous(), aligned(T)
    out = x.new_empty(n, width)
    _kernels().permuted_transpose[_grid(width, n)](x, place, out, T, n, width, *_TILE)
    return out


def from_columns(v: Tensor, place: Tensor, T: int) -> Tensor:
    """The inverse of :func:`to_columns` for v (n, width): (T, n)."""
    n, width = v.shape
    place = place if len(place) else torch.arange(n, device=v.device)
    out = v.new_empty(T, n)
    _kernels().transpose_back[_grid(T, n)](v, place, out, T, n, width, *_TILE)
    return out


def cubic_blocks(vectors: Tensor, b: int, dtype: torch.dtype, low: torch.dtype) -> Tensor:
    """I + 2A + 2A² + A³ (k, b, b) in ``dtype``, for skew A from float32 vectors (k, b(b-1)/2); products in ``low``."""
    grid, B = _tiles(len(vectors), b)
    skews, blocks = _skews(vectors, b, low), vectors.new_empty(len(vectors), b, b, dtype=dtype)
    squares = torch.empty_like(skews)
    _kernels().square[grid](skews, squares, b, B)
    _kernels().cubic[grid](vectors, skews, squares, blocks, b, B)
    return blocks


def cubic_gradient(vectors: Tensor, grad: Tensor, low: torch.dtype) -> Tensor:
    """The gradient of the vectors of :func:`cubic_blocks` from that of the blocks (k, b, b)."""
    grid, B = _tiles(len(vectors), b := grad.shape[-1])
    skews, out = _skews(vectors, b, low), torch.empty_like(vectors)
    product = torch.empty_like(skews)
    _kernels().gradient_product[grid](skews, grad, product, b, B)
    _kernels().cubic_gradient[grid](skews, grad, product, out, b, B)
    return out


def _skews(vectors: Tensor, b: int, dtype: torch.dtype) -> Tensor:
    grid, B = _tiles(len(vectors), b)
    out = vectors.new_empty(len(vectors), b, b, dtype=dtype)
    _kernels().skew[grid](vectors, out, b, B)
    return out


@cache
def _kernels() -> Any:
    """The kernels' module, imported when it is needed: Triton is not everywhere."""
    return importlib.import_module("manifold_tying.kernels._triton_rotation")


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // _TILE[0]), -(-columns // _TILE[1])


def _tiles(k: int, b: int) -> tuple[tuple[int, int, int], int]:
    """The grid, and the side of a square tile, for k matrices (b, b)."""
    B = 32 if b <= 32 else 64
    return (k, -(-b // B), -(-b // B)), B
