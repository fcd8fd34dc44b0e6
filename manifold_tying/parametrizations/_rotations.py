"""The two rotations of a weight from its stored vector, and the vector's gradient from theirs."""

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
    layer: they are computed again there.
    """

    R: Primitive
    P: Primitive
    terms: int | None

    @torch.no_grad()
    def blocks(self, stored: Tensor, dtype: torch.dtype | None = None) -> tuple[Blocks, Blocks]:
        """The blocks of R and those of P, in the stored vector's dtype or in a narrower one, for narrower products."""
        of_R, of_P = stored.split([self.R.size, self.P.size], -1)
        return self.R.blocks(of_R, self.terms, dtype), self.P.blocks(of_P, self.terms, dtype)

    def gradient(self, stored: Tensor, of_R: Blocks, of_P: Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient of the stored vector from those of the blocks, which were used in ``dtype``."""
        narrow = dtype if dtype == torch.bfloat16 else None  # of float16 the range does not suffice
        parts = stored.split([self.R.size, self.P.size], -1)
        found = []
        for side, part, (of_whole, of_rest) in zip((self.R, self.P), parts, (of_R, of_P), strict=True):
            whole, rest = side.divided(part)
            found.append(_gradient(whole, side.block, self.terms, of_whole, narrow).flatten(-2))
            found.append(_gradient(rest, side.ragged, self.terms, of_rest, narrow))
        return torch.cat(found, -1)


def _gradient(vector: Tensor, b: int, terms: int | None, of_blocks: Tensor, narrow: torch.dtype | None) -> Tensor:
    """Of skew vectors (..., b(b-1)/2) from that of their orthogonal blocks (..., b, b)."""
    if vector.numel() == 0:
        return vector
    A = linalg.skew(vector, b)
    if terms is None:
        of_A = linalg.cayley_gradient(A, of_blocks)
    else:
        of_A = linalg.cayley_neumann_gradient(A, of_blocks, terms, narrow)
    return linalg.unskew(of_A - of_A.mT)
