"""The two rotations of a weight from its stored vector, and the vector's gradient from theirs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._primitive import Blocks, Primitive


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
        if self._joined:
            G, H = self._both.blocks(stored, self.terms, dtype)
            of_R, of_P = G.split([self.R.count, self.P.count], -3)
            return (of_R, H[..., :0, :0]), (of_P, H)
        of_R, of_P = stored.split([self.R.size, self.P.size], -1)
        return self.R.blocks(of_R, self.terms, dtype), self.P.blocks(of_P, self.terms, dtype)

    def gradient(self, stored: Tensor, of_R: Blocks, of_P: Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient of the stored vector from those of the blocks, which were used in ``dtype``."""
        narrow = dtype if dtype == torch.bfloat16 else None  # of float16 the range does not suffice
        if self._joined:
            sides = [(self._both, stored, (torch.cat([of_R[0], of_P[0]], -3), of_P[1]))]
        else:
            parts = stored.split([self.R.size, self.P.size], -1)
            sides = [(self.R, parts[0], of_R), (self.P, parts[1], of_P)]
        found = []
        for side, part, (of_whole, of_rest) in sides:
            whole, rest = side.divided(part)
            found.append(_gradient(whole, side.block, self.terms, of_whole, narrow).flatten(-2))
            found.append(_gradient(rest, side.ragged, self.terms, of_rest, narrow))
        return torch.cat(found, -1)

    @property
    def _joined(self) -> bool:
        """Whether R's and P's whole blocks are alike and side by side, so that half as many operations make them all."""
        return self.R.block == self.P.block and self.R.ragged == 0

    @property
    def _both(self) -> Primitive:
        return Primitive(self.R.n + self.P.n, self.R.block, self.R.covered + self.P.covered)


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
