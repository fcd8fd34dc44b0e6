"""The two rotations of a weight from its stored vector, and the vector's gradient from theirs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._blocks import Blocks
from manifold_tying.parametrizations._primitive import Primitive, orthogonal_of


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
        found = [orthogonal_of(part, b, self.terms, dtype) for part, b in self._parts(stored)]
        return self._by_side(found, stored.ndim - 1)

    def gradient(self, stored: Tensor, of_R: Blocks, of_P: Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient of the stored vector from those of the blocks, which were used in ``dtype``."""
        narrow = dtype if dtype == torch.bfloat16 else None  # of float16 the range does not suffice
        (whole_R, rest_R), (whole_P, rest_P) = of_R, of_P
        of_blocks = [torch.cat([whole_R, whole_P], -3)] if self._alike else [whole_R, whole_P]
        parts = zip(self._parts(stored), [*of_blocks, rest_R, rest_P], strict=True)
        found = [_gradient(part, b, self.terms, of_part, narrow) for (part, b), of_part in parts]
        (whole_R, rest_R), (whole_P, rest_P) = self._by_side(found, stored.ndim - 1)
        return torch.cat([whole_R.flatten(-2), rest_R, whole_P.flatten(-2), rest_P], -1)

    @property
    def _alike(self) -> bool:
        """Whether R's and P's whole blocks are of one size: then they go through their maps together."""
        return self.R.block == self.P.block

    def _parts(self, stored: Tensor) -> list[tuple[Tensor, int]]:
        """(skew vectors, block size) of what goes through a map together: whole blocks, R's ragged one, P's."""
        of_R, of_P = stored.split([self.R.size, self.P.size], -1)
        (whole_R, rest_R), (whole_P, rest_P) = self.R.divided(of_R), self.P.divided(of_P)
        if self._alike:
            whole = [(torch.cat([whole_R, whole_P], -2), self.R.block)]
        else:
            whole = [(whole_R, self.R.block), (whole_P, self.P.block)]
        return [*whole, (rest_R, self.R.ragged), (rest_P, self.P.ragged)]

    def _by_side(self, found: list[Tensor], dim: int) -> tuple[Blocks, Blocks]:
        """What was made of the parts, R's and P's; whole blocks are counted along dim."""
        *whole, rest_R, rest_P = found
        if self._alike:
            whole = list(whole[0].split([self.R.count, self.P.count], dim))
        return (whole[0], rest_R), (whole[1], rest_P)


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
