"""Points, gradients and steps that the tests of the optimizers share."""

from collections.abc import Callable
from typing import Any

import geoopt
import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn

import manifold_tying as mt

Gradients = Callable[[int, int, Tensor], Tensor | None]


def point(n: int, p: int, retraction: Any = "polar", dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter on Stiefel."""
    manifold = mt.Stiefel(retraction)
    return geoopt.ManifoldParameter(manifold.projx(torch.randn(n, p, dtype=dtype)), manifold=manifold)


def drive(optimizer: Any, params: list[Any], steps: int, gradient: Gradients, start: int = 0) -> None:
    for step in range(start, start + steps):
        for i, p in enumerate(params):
            p.grad = gradient(step, i, p)
        optimizer.step()


def seeded(step: int, i: int, p: Tensor) -> Tensor:
    """The same gradient for the same step and parameter, whoever asks."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def snapshot(optimizer: Any, params: list[Any]) -> list[Tensor]:
    state = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in [*params, *state]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def polar_np(Y: np.ndarray) -> np.ndarray:
    return scipy.linalg.polar(Y)[0]


def tangent(X: np.ndarray, D: np.ndarray) -> np.ndarray:
    return D - X @ (X.T @ D + D.T @ X) / 2


def named(kind: Any, **options: Any) -> tuple[Any, list[Any]]:
    params = [nn.Parameter(torch.randn(3)), point(8, 3), point(8, 3)]
    return kind(zip(("bias", "first.weight", "second.weight"), params, strict=True), lr=0.1, **options), params


def with_bad(where: int, bad: float) -> Gradients:
    """An entry of the gradient of one parameter."""

    def gradient(step: int, i: int, p: Tensor) -> Tensor:
        g = seeded(step, i, p)
        if i == where:
            g.view(-1)[1] = bad
        return g

    return gradient


def as_point(p: Any) -> Any:
    p.manifold = mt.Stiefel()
    return p
