"""The manifold under test, and helpers shared by the laws of manifolds and optimizers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import geoopt
import torch
from hypothesis import strategies as st
from torch import Tensor

from manifold_tying.testing._assertions import assert_close, rounding
from manifold_tying.testing._laws import Draw, skip_on
from manifold_tying.testing._strategies import BATCHES, ambient, points, tangent_vectors, unit

# Manifold operations chain decompositions and solves; rounding() alone bounds one product.
CHAIN = 1e3


@dataclass(frozen=True)
class Subject:
    """The manifold, the shape of a point, and the caller's claims about them."""

    manifold: geoopt.Manifold
    shape: tuple[int, ...]
    order: int
    uniform: bool
    device: torch.types.Device

    def draw(self, draw: Draw, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """A point, or a batch of them, and ambient vectors of length about 1."""
        shape = (*draw(st.sampled_from(BATCHES), "batch shape"), *self.shape)
        x = draw(points(self.manifold, shape, dtype=dtype, device=self.device), "point")
        v = draw(ambient(shape, dtype=dtype, device=self.device), "ambient vector")
        return x, v / math.prod(self.shape) ** 0.5

    def tangent(self, draw: Draw, x: Tensor, size: float = 1.0) -> Tensor:
        return draw(tangent_vectors(self.manifold, x, size=size), "tangent vector")

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        product: Tensor = self.manifold.inner(x, u, v)
        found, batch = tuple(product.shape), tuple(x.shape[: -len(self.shape)])
        if found != batch:
            raise AssertionError(f"inner of points {tuple(x.shape)} has the shape {found}, not {batch}")
        return product

    def projected(self, outside: Tensor) -> Tensor:
        """projx; it may raise ValueError if no nearest point exists, e.g. for -1 and positive definite matrices."""
        point: Tensor = skip_on(ValueError)(self.manifold.projx)(outside)
        return point

    def implemented(self, name: str) -> Callable[..., Tensor]:
        """The manifold's method; its NotImplementedError skips the law."""
        method: Callable[..., Tensor] = getattr(self.manifold, name)
        return skip_on(NotImplementedError)(method)

    def event(self) -> tuple[int, ...]:
        return tuple(range(-len(self.shape), 0))

    def unit_vector(self, draw: Draw, x: Tensor) -> Tensor:
        """A tangent vector of length 1 in the metric, shortened until no entry exceeds 1."""
        v = draw(ambient(tuple(x.shape), dtype=x.dtype, device=x.device), "ambient vector")
        u = unit(self.manifold, x, self.manifold.proju(x, v))
        return u / u.abs().max().clamp_min(1.0)

    def metric_condition(self, x: Tensor) -> float:
        """Error amplification of the metric: the squared condition number of a matrix, the conformal factor of a vector."""
        if len(self.shape) < 2:
            return 1 / max(1e-6, float((1 - x.square().sum(-1)).abs().min())) ** 2
        return float(torch.linalg.cond(x.detach()).max()) ** 2


def assert_on_manifold(manifold: geoopt.Manifold, x: Tensor) -> None:
    """The manifold's own point check passes with a tolerance of 1000 times :func:`rounding`."""
    atol = _allowed(x)
    ok, reason = manifold.check_point_on_manifold(x, explain=True, atol=atol, rtol=atol)
    if not ok:
        raise AssertionError(f"not on {manifold}: {reason}")


def assert_tangent(manifold: geoopt.Manifold, x: Tensor, u: Tensor) -> None:
    """The manifold's own tangent check passes with a tolerance of 1000 times :func:`rounding`, scaled by x and u."""
    atol = _allowed(x) * max(1.0, float(u.abs().max()) * max(1.0, float(x.abs().max()))) if u.numel() else 0.0
    ok, reason = manifold.check_vector_on_tangent(x, u, explain=True, atol=atol, rtol=atol)
    if not ok:
        raise AssertionError(f"not tangent to {manifold}: {reason}")


def _allowed(x: Tensor) -> float:
    return rounding(x.dtype, max(x.shape[-2:], default=1), CHAIN)


def close(actual: Tensor, expected: Tensor, what: str, condition: float = 1.0) -> None:
    assert_close(actual, expected, what, CHAIN * condition)


def require_near(actual: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    error = (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    if not error <= allowed:
        raise AssertionError(f"{what} is {error:.3g}; allowed is {allowed:.0e}")
