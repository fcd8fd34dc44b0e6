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
    layer: they are computed again there.
    """

    R: Primitive
    P: Primitive
    terms: int | None

    def skews(self, stored: Tensor) -> list[Tensor]:
        """The skew matrices of R's whole blocks (k, b, b) and of its ragged one (r, r), then P's."""
        of_R, of_P = stored.split([self.R.size, self.P.size], -1)
        (whole_R, rest_R), (whole_P, rest_P) = self.R.divided(of_R), self.P.divided(of_P)
        return [
            linalg.skew(whole_R, self.R.block),
            linalg.skew(rest_R, self.R.ragged),
            linalg.skew(whole_P, self.P.block),
            linalg.skew(rest_P, self.P.ragged),
        ]

    def blocks(self, skews: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Blocks, Blocks]:
        """The blocks of R and those of P, in the skew matrices' dtype or in a narrower one, for narrower products."""
        whole_R, rest_R, whole_P, rest_P = (_orthogonal(A, self.terms, dtype or A.dtype) for A in skews)
        return (whole_R, rest_R), (whole_P, rest_P)

    def gradient(self, skews: Sequence[Tensor], of_R: Blocks, of_P: Blocks, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient of the stored vector from those of the blocks, which were used in ``dtype``."""
        narrow = dtype if dtype == torch.bfloat16 else None  # of float16 the range does not suffice
        whole_R, rest_R, whole_P, rest_P = (
            _gradient(A, self.terms, of_block, narrow) for A, of_block in zip(skews, (*of_R, *of_P), strict=True)
        )
        return torch.cat([whole_R.flatten(-2), rest_R, whole_P.flatten(-2), rest_P], -1)


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
