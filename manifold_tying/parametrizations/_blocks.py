"""Products with block-diagonal orthogonal matrices, block by block."""

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._orders import take

_NARROWEST_APART = 64  # blocks: below, the calls cost more than they save

Blocks = tuple[Tensor, Tensor]
"""G (..., k, b, b) and the ragged last block (..., r, r), r = 0 where there is none."""

Side = tuple[Blocks, Tensor]
"""The blocks of R or of P, and the order of the dimensions that they rotate."""


def rotated_columns(x: Tensor, blocks: Blocks, order: Tensor) -> Tensor:
    """x P for x (..., T, n), blocks with the same leading dimensions; not differentiated."""
    return x.index_copy(-1, order, multiply(take(x, order), blocks, True)) if len(order) else x


def rotated_rows(x: Tensor, blocks: Blocks, order: Tensor) -> Tensor:
    """R x for x (..., n, T)."""
    return x.index_copy(-2, order, multiply_rows(x.index_select(-2, order), blocks, False)) if len(order) else x


def multiply(z: Tensor, blocks: Blocks, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Block by block z_j G_jᵀ, or z_j G_j where ``transposed``, z (..., T, n); columns past the blocks stay."""
    G, H = (factor.to(z.dtype) for factor in blocks)
    if not transposed:
        G, H = G.mT, H.mT
    whole, covered = _covered(blocks)
    if z.ndim == 2 and not linalg.is_traced():  # into place, which saves a pass
        out = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
        if z.dtype.itemsize == 2 and z.device.type == "cpu" and G.shape[-1] >= _NARROWEST_APART:
            for j, factor in enumerate(G):
                of_block = slice(j * len(factor), (j + 1) * len(factor))
                torch.mm(z[:, of_block], factor, out=out[:, of_block])
        else:
            torch.bmm(_split(z, G), G, out=_split(out, G))
        if covered > whole:
            out[:, whole:covered] = z[:, whole:covered] @ H
        if covered < z.shape[-1]:
            out[:, covered:] = z[:, covered:]
        return out
    parts = [(_split(z, G) @ G).transpose(-3, -2).flatten(-2), z[..., whole:covered] @ H, z[..., covered:]]
    return _joined(parts, -1)


def multiply_rows(z: Tensor, blocks: Blocks, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Block by block G_j z_j, or G_jᵀ z_j where ``transposed``, z (..., n, T); rows past the blocks stay."""
    G, H = (factor.to(z.dtype) for factor in blocks)
    if transposed:
        G, H = G.mT, H.mT
    whole, covered = _covered(blocks)
    apart = G.shape[-3:-1]
    if z.ndim == 2 and not linalg.is_traced():
        out = torch.empty_like(z, memory_format=torch.contiguous_format) if out is None else out
        torch.bmm(G, z[:whole].unflatten(0, apart), out=out[:whole].unflatten(0, apart))
        if covered > whole:
            torch.mm(H, z[whole:covered], out=out[whole:covered])
        if covered < len(z):
            out[covered:] = z[covered:]
        return out
    w = (G @ z[..., :whole, :].unflatten(-2, apart)).flatten(-3, -2)
    return _joined([w, H @ z[..., whole:covered, :], z[..., covered:, :]], -2)


def outer(left: Tensor, right: Tensor, like: Blocks, add_to: Blocks | None = None) -> Blocks:
    """Block by block left_jᵀ right_j, both (..., T, n): what a product with the blocks leaves as their gradient.

    With ``add_to``, of the blocks' shapes, added to it in place. Columns past the blocks do not count.
    """
    G, H = like
    whole, covered = _covered(like)
    if add_to is not None and left.device.type == "cpu" and G.shape[-1] >= _NARROWEST_APART:
        _add_outer(left, right, add_to)
        return add_to
    left_G, left_H = _split(left, G).mT, left[..., whole:covered].mT
    right_G, right_H = _split(right, G), right[..., whole:covered]
    if add_to is None:
        return (left_G @ right_G).to(G.dtype), (left_H @ right_H).to(H.dtype)
    if left.dtype == add_to[0].dtype:
        return add_to[0].baddbmm_(left_G, right_G), add_to[1].addmm_(left_H, right_H)
    return add_to[0].add_(left_G @ right_G), add_to[1].add_(left_H @ right_H)


def _add_outer(left: Tensor, right: Tensor, add_to: Blocks) -> None:
    """:func:`outer` one block after another, left and right (T, n): a batched product would copy both to line them up."""
    start = 0
    for found in (*add_to[0], add_to[1]):
        of_block = slice(start, start + len(found))
        if left.dtype == found.dtype:
            found.addmm_(left[:, of_block].mT, right[:, of_block])
        else:
            found.add_(left[:, of_block].mT @ right[:, of_block])
        start += len(found)


def _split(z: Tensor, G: Tensor) -> Tensor:
    """(..., T, covered) to (..., k, T, b), a view."""
    k, b = G.shape[-3], G.shape[-1]
    return z[..., : k * b].unflatten(-1, (k, b)).transpose(-3, -2)


def _covered(blocks: Blocks) -> tuple[int, int]:
    """How many dimensions the whole blocks rotate, and how many with the ragged one."""
    G, H = blocks
    whole = G.shape[-3] * G.shape[-1]
    return whole, whole + H.shape[-1]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    parts = [part for part in parts if part.shape[dim]] or parts[:1]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
