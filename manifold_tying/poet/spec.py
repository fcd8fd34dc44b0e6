"""Sizes, seeds, permutations and initial matrices of an equivalence W = R W0 P.

R = Ψᵀ Diag(G_1, ..., G_k, G_last, I) Ψ with a permutation Ψ and blocks G_j, Cayley(-Neumann) maps of skew matrices; P
likewise. (POET, sections 3.1 and 3.2, equations 4 and 5.)
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from manifold_tying import autograd, linalg, precision

Scheme = Literal["block", "full"]
Sides = Literal["both", "in", "out"]
Terms = int | Literal["exp"] | None
"""Of the Neumann series; None for the exact Cayley map, "exp" for exp(2A)."""
Init = Literal["keep", "normalized", "uniform-spectrum", "xavier", "standard"]
_STANDARD_STD = 0.02
_MAX_TERMS = 64  # each term costs a matmul per block; the exact map is one solve


@dataclass(frozen=True)
class BlockSpec:
    """One side: ``num_rotated`` of ``n`` dimensions rotate, in blocks of ``block``; the last block may be smaller."""

    n: int
    block: int
    num_rotated: int

    def __post_init__(self) -> None:
        precision.check_int("the dimensions of a side", self.n, 1)
        precision.check_int("a block's size", self.block, 1)
        precision.check_int("the dimensions that rotate", self.num_rotated, 0)
        if max(self.block, self.num_rotated) > self.n:
            raise ValueError(
                f"block ({self.block}) and rotating dimensions ({self.num_rotated}) must not exceed the dimension {self.n}"
            )

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(count, size) of the equal blocks and of a smaller last one; blocks of size 1 cannot rotate."""
        k, remainder = divmod(self.num_rotated, self.block)
        return [(count, b) for count, b in ((k, self.block), (1, remainder)) if count and b > 1]

    @property
    def num_params(self) -> int:
        """Number of skew parameters, b(b-1)/2 for each block."""
        return sum(k * _pairs(b) for k, b in self.runs)

    def split(self, skew_params: Tensor) -> list[tuple[Tensor, int]]:
        """Split (..., num_params) into one (..., k, b(b-1)/2) for each run of equal blocks, with its b."""
        parts, start = [], 0
        for k, b in self.runs:
            size = k * _pairs(b)
            parts.append((skew_params[..., start : start + size].unflatten(-1, (k, _pairs(b))), b))
            start += size
        return parts

    def sample_permutation(self, seed: int, count: int, side: str) -> Tensor:
        """All dimensions in random order, int64 on the CPU; the first ``num_rotated`` rotate. Empty if none does.

        Depends on the arguments only, so all ranks and resumed runs agree.
        """
        generator = torch.Generator("cpu").manual_seed(hash_seed(seed, side, count))
        return torch.randperm(self.n if self.num_rotated else 0, generator=generator, device="cpu")


@dataclass(frozen=True)
class RotationSpec:
    """Both sides of a matrix (m, n), R of m dimensions and P of n, and the terms of their Cayley maps."""

    R: BlockSpec
    P: BlockSpec
    terms: Terms = None

    @classmethod
    def of(
        cls, m: int, n: int, scheme: Scheme, block_size: int, fraction: float | None, out_share: float | None,
        sides: Sides = "both", terms: Terms = None,
    ) -> "RotationSpec":  # fmt: skip
        """From the options of :func:`equivalence`."""
        dims = (m, n)
        blocks = [min(size, block_size if fraction is None else max(1, round(fraction * size))) for size in dims]
        if out_share is not None:
            rotated = [(b if scheme == "full" else size, b) for b, size in zip(blocks, dims, strict=True)]
            total = sum(size * (b - 1) / 2 for size, b in rotated)  # if b divides size (POET, table 1)
            shares = (out_share * total, (1 - out_share) * total)
            blocks = [min(size, _block_for(scheme, size, share)) for share, size in zip(shares, dims, strict=True)]
        if sides != "both":
            blocks[0 if sides == "in" else 1] = 1
        R, P = (
            BlockSpec(size, b, 0 if b < 2 else size if scheme == "block" else b)
            for b, size in zip(blocks, dims, strict=True)
        )
        return cls(R, P, terms)

    @property
    def num_params(self) -> int:
        """Number of skew parameters; 0 if nothing rotates."""
        return self.R.num_params + self.P.num_params

    def split(self, skew_params: Tensor) -> tuple[Tensor, Tensor]:
        """Split (..., num_params) into R's and P's. Slices: torch 2.13 cannot compile a checkpointed ``split``."""
        return skew_params[..., : self.R.num_params], skew_params[..., self.R.num_params :]


class Permutations(NamedTuple):
    """All rows and columns of W, int64, those that rotate first, and the inverses; empty for a side without rotation."""

    rows: Tensor
    columns: Tensor
    rows_inverse: Tensor
    columns_inverse: Tensor

    @classmethod
    def of(cls, rows_inverse: Tensor, columns_inverse: Tensor) -> "Permutations":
        """From the place of each row and column."""
        return cls(inverse_order(rows_inverse), inverse_order(columns_inverse), rows_inverse, columns_inverse)


def inverse_order(order: Tensor) -> Tensor:
    """The inverse of a permutation, or of each (..., n)."""
    return torch.empty_like(order).scatter(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def random_seed() -> int:
    """A seed from torch's default CPU generator, independent of the default device."""
    drawn = torch.randint(2**62, (), device="cpu")
    return int(drawn) if autograd.has_data(drawn) else 0


def hash_seed(*parts: int | str) -> int:
    """A 63-bit seed from numbers and names, the same in every process (unlike ``hash``)."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


def _pairs(b: int) -> int:
    return b * (b - 1) // 2


def _block_for(scheme: Scheme, size: int, params: float) -> int:
    """The block size that comes closest to this number of skew parameters."""
    b = 1 + 2 * params / size if scheme == "block" else (1 + math.sqrt(1 + 8 * params)) / 2
    return max(1, round(b))


def initial_matrix(shape: Sequence[int], init: Init, seed: int) -> Tensor:
    """W0 (..., m, n), float32 on the CPU, determined by the seed; see :func:`equivalence`. (POET, section 3.1.)"""
    generator = torch.Generator("cpu").manual_seed(hash_seed(seed, "init"))
    W0 = torch.randn(*shape, generator=generator, device="cpu")
    if init == "normalized":
        norms: Tensor = W0.norm(dim=-1, keepdim=True)
        return W0 / norms
    if init == "uniform-spectrum":
        tall = W0 if W0.shape[-2] >= W0.shape[-1] else W0.mT
        factor = linalg.polar(tall.contiguous())[0]
        return factor if tall is W0 else factor.mT.contiguous()
    std = math.sqrt(2 / (shape[-2] + shape[-1])) if init == "xavier" else _STANDARD_STD
    return W0 * std


def check_options(
    scheme: Scheme, block_size: int, fraction: float | None, terms: int | None, init: Init, seed: int | None,
    out_share: float | None, sides: Sides = "both",
) -> None:  # fmt: skip
    """ValueError unless the options of :func:`equivalence` are valid."""
    for what, value, choices in (("scheme", scheme, Scheme), ("init", init, Init), ("sides", sides, Sides)):
        precision.check_choice(what, value, choices)
    precision.check_int("block_size", block_size, 2)
    if fraction is not None and scheme != "full":
        raise ValueError('fraction needs scheme="full"; scheme="block" rotates every dimension: choose block_size')
    if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
        raise ValueError(f"expected 0 < fraction <= 1, got {fraction!r}")
    if terms is not None:
        precision.check_int("terms", terms, 1, ", or None for the exact map")
        if terms > _MAX_TERMS:
            raise ValueError(f"expected at most {_MAX_TERMS} terms, got {terms}; None is the exact map")
    if seed is not None:
        precision.check_int("seed", seed, 0)
        if seed >= 2**63:
            raise ValueError(f"expected a seed below 2**63, got {seed}")
    if out_share is not None and not (isinstance(out_share, int | float) and 0 <= out_share <= 1):
        raise ValueError(f"expected 0 <= out_share <= 1, the share of the parameters for R, got {out_share!r}")
    if out_share is not None and sides != "both":
        raise ValueError(f"out_share splits the parameters of both sides; leave it out with sides={sides!r}")
