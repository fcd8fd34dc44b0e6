"""Strategies for shapes, points, vectors and token ids. They shrink towards small ones."""

from collections.abc import Sequence
from typing import Any

import geoopt
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
BATCHES: Sequence[tuple[int, ...]] = ((), (1,), (3,), (2, 2))


def tall_shapes(*, max_columns: int = 8, max_extra: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes (..., n, p) with 1 <= p <= max_columns and p <= n <= p + max_extra."""
    sizes = st.tuples(st.integers(1, max_columns), st.integers(0, max_extra))
    return st.builds(lambda batch, size: (*batch, sum(size), size[0]), st.sampled_from(BATCHES), sizes)


def token_ids(vocab_size: int, *, max_dims: int = 2, max_side: int = 5) -> st.SearchStrategy[Tensor]:
    """int64 ids below vocab_size, of 0 to ``max_dims`` dimensions; some are empty."""
    shapes = array_shapes(min_dims=0, max_dims=max_dims, min_side=0, max_side=max_side)
    return arrays("int64", shapes, elements=st.integers(0, vocab_size - 1)).map(torch.from_numpy)


@st.composite
def ambient(draw: Any, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float64, device: Any = None) -> Tensor:
    """Standard normal entries."""
    # The seeds are disjoint from those of points, so that vectors are independent of points.
    generator = torch.Generator().manual_seed(draw(SEEDS) + 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


@st.composite
def points(
    draw: st.DrawFn,
    manifold: geoopt.Manifold,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.types.Device = None,
) -> Tensor:
    """Random points of a manifold: ``manifold.random``, or ``manifold.projx`` of a normal tensor if that is missing."""
    return random_point(manifold, shape, draw(SEEDS), dtype, device)


def random_point(
    manifold: geoopt.Manifold, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.types.Device
) -> Tensor:
    """The random point for a seed. Restores torch's generator."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # CPU only; torch.manual_seed seeds all devices and takes 1 ms
        try:
            x: Tensor = manifold.random(*shape, dtype=dtype)
        except NotImplementedError:
            x = manifold.projx(torch.randn(shape, dtype=dtype))
    return x.detach().as_subclass(Tensor).to(device)


@st.composite
def tangent_vectors(draw: st.DrawFn, manifold: geoopt.Manifold, point: Tensor, *, size: float = 1.0) -> Tensor:
    """Tangent vectors at a point with length from 0 to ``size`` in the manifold's metric."""
    u = manifold.proju(point, draw(ambient(tuple(point.shape), dtype=point.dtype, device=point.device)))
    return draw(st.floats(0, size)) * unit(manifold, point, u)


def unit(manifold: geoopt.Manifold, point: Tensor, u: Tensor) -> Tensor:
    """u normalized in the manifold's metric, or zero if u is only rounding, as on St(1, 1)."""
    norm = manifold.norm(point, u, keepdim=True)
    return torch.where(u.abs().amax() > 1e-5, u / norm.clamp_min(1e-30), 0.0)
