"""The two rotations of a weight from its stored vector, and the vector's gradient from theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import Blocks
from manifold_tying.parametrizations._primitive import Primitive


@dataclass(frozen=True)
class Rotations:
    """R and P of a stored vector, R's numbers and then P's.

    Not by autograd, which would keep a skew matrix and a block of each, four times what is stored, for the backward of every
    layer: they are computed again there. Whole blocks of one size go through their maps together, R's and P's.
    """

    R: Primitive
    P: Primitive
    terms: int | None

    def skews(self, stored: Tensor) -> list[Tensor]:
        """The skew matrices of whole blocks (..., k, b, b), in one tensor if of one size, and of ragged ones (..., r, r)."""
        of_R, of_P = stored.split([self.R.size, self.P.size], -1)
        (whole_R, rest_R), (whole_P, rest_P) = self.R.divided(of_R), self.P.divided(of_P)
        rests = [linalg.skew(rest_R, self.R.ragged), linalg.skew(rest_P, self.P.ragged)]
        if self._alike:
            return [linalg.skew(torch.cat([whole_R, whole_P], -2), self.R.block), *rests]
        return [linalg.skew(whole_R, self.R.block), linalg.skew(whole_P, self.P.block), *rests]

    def blocks(self, skews: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Blocks, Blocks]:
        """The blocks of R and those of P, in the skew matrices' dtype or in a narrower one, for narrower products."""
        return self._by_side([_orthogonal(A, self.terms, dtype or A.dtype) for A in skews], -3)

    def gradient(self, skews: Sequence[Tensor], of_R: Blocks, of_P: Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient of the stored vector from those of the blocks, which were used in ``dtype``."""
        narrow = dtype if dtype == torch.bfloat16 else None  # of float16 the range does not suffice
        whole = [torch.cat([of_R[0], of_P[0]], -3)] if self._alike else [of_R[0], of_P[0]]
        found = [
            _gradient(A, self.terms, of_block, narrow)
            for A, of_block in zip(skews, [*whole, of_R[1], of_P[1]], strict=True)
        ]
        (whole_R, rest_R), (whole_P, rest_P) = self._by_side(found, -2)
        return torch.cat([whole_R.flatten(-2), rest_R, whole_P.flatten(-2), rest_P], -1)

    @property
    def _alike(self) -> bool:
        return self.R.block == self.P.block

    def _by_side(self, found: Sequence[Tensor], dim: int) -> tuple[Blocks, Blocks]:
        """What was made of :meth:`skews`, R's and P's, where whole blocks are counted by that dimension."""
        *whole, rest_R, rest_P = found
        whole_R, whole_P = whole[0].split([self.R.count, self.P.count], dim) if self._alike else whole
        return (whole_R, rest_R), (whole_P, rest_P)


def _orthogonal(A: Tensor, terms: int | None, dtype: torch.dtype) -> Tensor:
    """Skew A (..., b, b) to orthogonal matrices; the identity, exactly, for zeros. (POET, equation 6.)"""
    if A.numel() == 0:
        return A.to(dtype)
    if terms == 2 and dtype == torch.bfloat16:  # of float16 the range does not suffice
        return linalg.cayley_neumann_rounded(A, dtype)
    return (linalg.cayley(A) if terms is None else linalg.cayley_neumann(A, terms)).to(dtype)


def _gradient(A: Tensor, terms: int | None, of_blocks: Tensor, narrow: torch.dtype | None) -> Tensor:
    """Of skew vectors (..., b(b-1)/2) from that of their orthogonal blocks (..., b, b)."""
    b = A.shape[-1]
    if A.numel() == 0:
        return A.new_empty(*A.shape[:-2], b * (b - 1) // 2)
    if terms is None:
        of_A = linalg.cayley_gradient(A, of_blocks)
    else:
        of_A = linalg.cayley_neumann_gradient(A, of_blocks, terms, narrow)
        if terms == 2:  # is skew
            return linalg.unskew(of_A).mul_(2)
    return linalg.unskew(of_A - of_A.mT)
