"""One primitive of stochastic primitive optimization: an orthogonal matrix of n dimensions made of small blocks.

R = Ψᵀ Diag(G_1, ..., G_k, G_ragged, I) Ψ with a permutation Ψ and blocks that are Cayley(-Neumann) maps of skew matrices
(POET, equations 4 and 5). No n x n matrix is formed: gather, small products, scatter.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from manifold_tying import linalg

_NARROWEST_APART = 64  # blocks: below, the calls cost more than they save

Blocks = tuple[Tensor, Tensor]
"""G (..., k, b, b) and the ragged last block (..., r, r), r = 0 where there is none."""


@dataclass(frozen=True)
class Primitive:
    """Sizes of one side: ``covered`` of ``n`` dimensions rotate, in blocks of ``block`` and a ragged last one."""

    n: int
    block: int
    covered: int

    @property
    def count(self) -> int:
        """k, the number of whole blocks."""
        return self.covered // self.block

    @property
    def ragged(self) -> int:
        """r, the size of the last, smaller block; 0 where there is none."""
        return self.covered % self.block

    @property
    def size(self) -> int:
        """How many numbers the skew matrices have: b(b-1)/2 each."""
        return self.count * _pairs(self.block) + _pairs(self.ragged)

    def divided(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """A skew vector (..., size) as those of the whole blocks, (..., k, b(b-1)/2), and of the ragged one."""
        whole, rest = vector.split([self.count * _pairs(self.block), _pairs(self.ragged)], -1)
        return whole.unflatten(-1, (self.count, _pairs(self.block))), rest

    def blocks(self, vector: Tensor, terms: int | None, dtype: torch.dtype | None = None) -> Blocks:
        """The orthogonal blocks of a skew vector (..., size), in its dtype or a narrower one; terms=None: exact Cayley map."""
        whole, rest = self.divided(vector)
        return orthogonal_of(whole, self.block, terms, dtype), orthogonal_of(rest, self.ragged, terms, dtype)

    def draw_order(self, seed: int, count: int, side: str) -> Tensor:
        """Which dimensions rotate, in which order: the first ``covered`` entries of a random permutation, int64 on the CPU.

        A function of its arguments alone, so that every process and every resumed run draws the same.
        """
        generator = torch.Generator("cpu").manual_seed(mixed_seed(seed, side, count))
        return torch.randperm(self.n, generator=generator, device="cpu")[: self.covered].clone()


def drawn_seed() -> int:
    """From torch's default generator of the CPU, whatever the default device is."""
    return int(torch.randint(2**62, (), device="cpu"))


def mixed_seed(*parts: int | str) -> int:
    """A seed of 63 bits out of numbers and names, the same in every process (``hash`` is not)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def orthogonal_of(vector: Tensor, b: int, terms: int | None, dtype: torch.dtype | None = None) -> Tensor:
    """Skew vectors (..., b(b-1)/2) to orthogonal (..., b, b); the identity, exactly, for zeros. (POET, equation 6.)"""
    dtype = dtype or vector.dtype
    if vector.numel() == 0:  # blocks of one dimension do not rotate
        return torch.eye(b, dtype=dtype, device=vector.device).expand(*vector.shape[:-1], b, b)
    A = linalg.skew(vector, b)
    if terms == 2 and dtype == torch.bfloat16:  # of float16 the range does not suffice
        return linalg.cayley_neumann_rounded(A, dtype)
    return (linalg.cayley(A) if terms is None else linalg.cayley_neumann(A, terms)).to(dtype)


def rotated(x: Tensor, blocks: Blocks, order: Tensor, transposed: bool = False) -> Tensor:
    """x Rᵀ, or x R where ``transposed``, x (..., T, n), blocks with the same leading dimensions; not differentiated."""
    if len(order) == 0:
        return x
    return put(x, multiply(take(x, order), blocks, transposed), order)


def rotated_rows(x: Tensor, blocks: Blocks, order: Tensor, transposed: bool = False) -> Tensor:
    """R x, or Rᵀ x where ``transposed``, x (..., n, T)."""
    if len(order) == 0:
        return x
    w = multiply_rows(x.index_select(-2, order), blocks, transposed)
    return w.index_select(-2, inverse(order)) if len(order) == x.shape[-2] else x.index_copy(-2, order, w)


def multiply(z: Tensor, blocks: Blocks, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Block by block z_j G_jᵀ, or z_j G_j where ``transposed``, z (..., T, n); columns past the blocks stay."""
    G, H = (factor.to(z.dtype) for factor in blocks)
    if not transposed:
        G, H = G.mT, H.mT
    whole, covered = _covered(blocks)
    if z.ndim == 2 and not torch.compiler.is_compiling():  # into place, which saves a pass
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
    if z.ndim == 2 and not torch.compiler.is_compiling():
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


def take(x: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """Columns of x (..., n), as index_select does it in twice the time on a CPU."""
    if x.dtype.itemsize == 2 and x.is_floating_point() and x.device.type == "cpu" and not torch.compiler.is_compiling():
        # On a CPU the operation itself would take these by way of float32.
        bits = take(x.view(torch.int16), order, None if out is None else out.view(torch.int16))
        return bits.view(x.dtype)
    return torch.gather(x, -1, order.expand(*x.shape[:-1], -1), out=out)


def put(x: Tensor, w: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """x (..., n) with w (..., covered) in the places of ``order``; not in place."""
    if len(order) == x.shape[-1]:
        return take(w, inverse(order), out)
    places = order.expand_as(w)
    return x.scatter(-1, places, w) if out is None else out.copy_(x).scatter_(-1, places, w)


def completed(order: Tensor, n: int) -> Tensor:
    """The n dimensions, those of ``order`` first and the others after them as they come."""
    if len(order) == n:
        return order
    others = torch.ones(n, dtype=torch.uint8, device=order.device).index_fill_(0, order, 0)
    return torch.cat([order, others.argsort(descending=True, stable=True)[: n - len(order)]])


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


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


def _pairs(b: int) -> int:
    return b * (b - 1) // 2
