"""How far POET's R and P have drifted from orthogonal: the norm of the skew matrices decides."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manifold_tying import linalg

if TYPE_CHECKING:
    from manifold_tying.parametrizations._equivalence import Equivalence

_LARGEST_DEFECT = 1e-3
_POWER_STEPS = 8


def check_norm(found: Sequence[tuple[str, "Equivalence", Tensor]]) -> None:
    """Warn about the layer whose R and P are furthest from orthogonal, where that is more than 1e-3."""
    drifted = []
    for path, part, stored in found:
        if part.terms is not None and not stored.is_meta:
            size = skew_norm(part, linalg.whole(stored)).double()
            drifted.append((float(series_defect(size, part.terms).nan_to_num(math.inf)), float(size), path))
    worst, norm, name = max(drifted, default=(0.0, 0.0, ""))
    if worst > _LARGEST_DEFECT:
        warnings.warn(
            f"{name}: the skew matrices have grown to a norm of {norm:.2g}, so R and P are orthogonal to {worst:.1g} only and "
            "the singular values drift; lower the learning rate, merge more often, or take more terms (terms=None is exact)",
            stacklevel=3,
        )


def series_defect(norm: Tensor, terms: int) -> Tensor:
    """‖RᵀR - I‖ of the Cayley map with that many terms, about: ‖A‖^(2 terms + 2) for an even number, 2‖A‖^(terms + 1) else."""
    return norm ** (2 * terms + 2) if terms % 2 == 0 else 2 * norm ** (terms + 1)


@torch.no_grad()
def skew_norm(part: "Equivalence", stored: Tensor) -> Tensor:
    """The largest spectral norm among the skew blocks of a stored vector, by power iteration: a few percent low at most."""
    norms = [stored.new_zeros(())]
    offset = 0
    for side in (part.sizes.R, part.sizes.P):
        for count, b in ((side.count, side.block), (1, side.ragged)):
            size = count * b * (b - 1) // 2
            if size:
                entries = stored[..., offset : offset + size].unflatten(-1, (count, -1))
                norms.append(_spectral_norms(linalg.skew(entries, b)).max())
            offset += size
    return torch.stack(norms).max()


def _spectral_norms(A: Tensor) -> Tensor:
    """Spectral norms of skew matrices (..., b, b)."""
    generator = torch.Generator("cpu").manual_seed(0)
    v = torch.randn(A.shape[-1], 1, generator=generator, device="cpu").to(A)
    norm = A.new_zeros(A.shape[:-2])
    with linalg.full_precision(A.device):
        for _ in range(_POWER_STEPS):
            v = A @ (A @ v)
            squared = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
            norm = squared[..., 0, 0].sqrt()
            v = v / squared.clamp_min(torch.finfo(A.dtype).tiny)
    return norm
