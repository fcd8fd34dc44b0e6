"""What :func:`equivalence` is told: schemes, block sizes, initial weights. (POET, sections 3.1 and 3.2.)"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from manifold_tying import linalg
from manifold_tying.parametrizations._primitive import Primitive, mixed_seed

Scheme = Literal["block", "full"]
Sides = Literal["both", "in", "out"]
Init = Literal["keep", "normalized", "uniform-spectrum", "xavier", "standard"]
_STANDARD_STD = 0.02
_MOST_TERMS = 64  # each costs a product of blocks; the exact map is one solve


@dataclass(frozen=True)
class Sizes:
    """The two sides of a matrix (m, n): R of m dimensions, P of n."""

    R: Primitive
    P: Primitive

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        scheme: Scheme,
        block_size: int,
        fraction: float | None,
        out_share: float | None,
        sides: Sides = "both",
    ) -> "Sizes":
        wanted = (
            (block_size, block_size) if fraction is None else (max(1, round(fraction * m)), max(1, round(fraction * n)))
        )
        blocks = [min(b, size) for b, size in zip(wanted, (m, n), strict=True)]
        if out_share is not None:
            total = sum(_parameters(scheme, size, b) for b, size in zip(blocks, (m, n), strict=True))
            blocks = [
                min(size, _block_for(scheme, size, share * total))
                for share, size in ((out_share, m), (1 - out_share, n))
            ]
        still = {"both": (), "in": (0,), "out": (1,)}[sides]
        blocks = [1 if i in still else b for i, b in enumerate(blocks)]
        return cls(
            *(
                Primitive(size, b, 0 if b < 2 else size if scheme == "block" else b)
                for b, size in zip(blocks, (m, n), strict=True)
            )
        )

    @property
    def parameters(self) -> int:
        """How many numbers the skew matrices have; 0 where nothing rotates."""
        return self.R.size + self.P.size


def _parameters(scheme: Scheme, size: int, b: int) -> float:
    """Skew parameters of one side, where b divides size. (POET, table 1.)"""
    return (size if scheme == "block" else b) * (b - 1) / 2


def _block_for(scheme: Scheme, size: int, parameters: float) -> int:
    """The block size that has about so many skew parameters."""
    b = 1 + 2 * parameters / size if scheme == "block" else (1 + math.sqrt(1 + 8 * parameters)) / 2
    return max(1, round(b))


def initial_matrix(shape: Sequence[int], init: Init, seed: int) -> Tensor:
    """W0 (..., m, n) in float32 on the CPU, from the seed alone; see :func:`equivalence`. (POET, section 3.1.)"""
    generator = torch.Generator("cpu").manual_seed(mixed_seed(seed, "init"))
    W0 = torch.randn(*shape, generator=generator, device="cpu")
    if init == "normalized":
        return W0 / W0.norm(dim=-1, keepdim=True)
    if init == "uniform-spectrum":
        tall = W0 if W0.shape[-2] >= W0.shape[-1] else W0.mT
        factor = linalg.polar(tall.contiguous())[0]
        return factor if tall is W0 else factor.mT.contiguous()
    std = math.sqrt(2 / (shape[-2] + shape[-1])) if init == "xavier" else _STANDARD_STD
    return W0 * std


def check_options(
    scheme: Scheme,
    block_size: int,
    fraction: float | None,
    terms: int | None,
    init: Init,
    seed: int | None,
    out_share: float | None,
    sides: Sides = "both",
) -> None:
    """ValueError unless the options of :func:`equivalence` are what it takes."""
    for what, value, choices in (("scheme", scheme, Scheme), ("init", init, Init), ("sides", sides, Sides)):
        if value not in get_args(choices):
            raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(get_args(choices))}")
    linalg.check_whole("block_size", block_size, 2)
    if fraction is not None and scheme != "full":
        raise ValueError('fraction needs scheme="full"; scheme="block" rotates every dimension: choose block_size')
    if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
        raise ValueError(f"expected 0 < fraction <= 1, got {fraction!r}")
    check_terms(terms)
    if seed is not None:
        check_seed(seed)
    if out_share is not None and not (isinstance(out_share, int | float) and 0 <= out_share <= 1):
        raise ValueError(f"expected 0 <= out_share <= 1, the share of the parameters for R, got {out_share!r}")
    if out_share is not None and sides != "both":
        raise ValueError(f"out_share splits the parameters of both sides; leave it out with sides={sides!r}")


def check_terms(terms: Any) -> None:
    """ValueError unless it is None or a number of terms from 1 to 64."""
    if terms is not None:
        linalg.check_whole("terms", terms, 1, ", or None for the exact map")
        if terms > _MOST_TERMS:
            raise ValueError(f"expected at most {_MOST_TERMS} terms, got {terms}; None is the exact map")


def check_seed(seed: Any) -> None:
    """ValueError unless it is a whole number that fits into int64."""
    linalg.check_whole("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"expected a seed below 2**63, got {seed}")
