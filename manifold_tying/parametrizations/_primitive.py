"""One primitive of stochastic primitive optimization: an orthogonal matrix of n dimensions made of small blocks.

R = Ψᵀ Diag(G_1, ..., G_k, G_ragged, I) Ψ with a permutation Ψ and blocks that are Cayley(-Neumann) maps of skew matrices
(POET, equations 4 and 5). No n x n matrix is formed.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from manifold_tying import linalg


@dataclass(frozen=True)
class Primitive:
    """Sizes of one side: ``covered`` of ``n`` dimensions rotate, in blocks of ``block`` and a ragged last one."""

    n: int
    block: int
    covered: int

    def __post_init__(self) -> None:
        linalg.check_whole("the dimensions of a side", self.n, 1)
        linalg.check_whole("a block's size", self.block, 1)
        linalg.check_whole("the dimensions that rotate", self.covered, 0)
        if max(self.block, self.covered) > self.n:
            raise ValueError(
                f"expected block and rotating dimensions to fit into {self.n}, got {self.block}, {self.covered}"
            )

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

    def draw_order(self, seed: int, count: int, side: str) -> Tensor:
        """Which dimensions rotate, in which order: the first ``covered`` entries of a random permutation, int64 on the CPU.

        A function of its arguments alone, so that every process and every resumed run draws the same.
        """
        generator = torch.Generator("cpu").manual_seed(mixed_seed(seed, side, count))
        return torch.randperm(self.n, generator=generator, device="cpu")[: self.covered].clone()


def drawn_seed() -> int:
    """From torch's default generator of the CPU, whatever the default device is."""
    drawn = torch.randint(2**62, (), device="cpu")
    return int(drawn) if linalg.has_values(drawn) else 0


def mixed_seed(*parts: int | str) -> int:
    """A seed of 63 bits out of numbers and names, the same in every process (``hash`` is not)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _pairs(b: int) -> int:
    return b * (b - 1) // 2
