"""Doubly stochastic weights: nonnegative, rows and columns sum to 1."""

from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from manifold_tying import linalg, precision
from manifold_tying.parametrizations._constraint import Constraint
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._register import register

M = TypeVar("M", bound=nn.Module)
DoublyStochasticMap = Literal["sinkhorn", "orthostochastic"]


class DoublyStochastic(Constraint):
    """The weight is sinkhorn(Y) of the stored Y (..., n, n), or with a base B the squares of the entries of B cayley(Y)."""

    base: Tensor | None

    def __init__(self, dtype: torch.dtype, base: Tensor | None) -> None:
        super().__init__(dtype)
        self.register_buffer("base", base)

    def describe(self) -> str:
        return f"doubly_stochastic(map={'sinkhorn' if self.base is None else 'orthostochastic'!r})"

    def forward(self, stored: Tensor) -> Tensor:
        P = linalg.sinkhorn(stored) if self.base is None else linalg.cayley_at(self.base, stored).square()
        return P.to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        if self.base is None:
            floor = weight.amax((-2, -1), keepdim=True) * torch.finfo(weight.dtype).eps
            return weight.maximum(floor.clamp_min(torch.finfo(weight.dtype).tiny)).log()
        # Alternate between orthogonal matrices and given magnitudes, from the signs of the base and from random ones.
        root = weight.clamp_min(0).sqrt()
        draws = torch.randn(64 // root.shape[-1], *root.shape, generator=torch.Generator().manual_seed(0)).to(root)
        R = torch.cat([self.base[None], draws])
        for _ in range(100):
            R = linalg.polar(root.copysign(R))[0]
        best = (R.square() - weight).square().sum((-2, -1), keepdim=True).argmin(0, keepdim=True)
        self.base.copy_(R.take_along_dim(best, 0)[0])
        return torch.zeros_like(weight)


def doubly_stochastic(module: M, name: str = "weight", *, map: DoublyStochasticMap = "sinkhorn") -> M:
    """Make the square matrices (..., n, n) of ``module.name`` doubly stochastic; any optimizer trains them.

    "sinkhorn" scales e^Y (:func:`manifold_tying.linalg.sinkhorn`) and reaches all positive ones. A weight that is assigned is
    scaled to one: its positive part, with entries of at least 1e-7 (float64: 2e-16) of the largest. So doubly stochastic
    weights are kept to rounding; entries at that floor hardly have a gradient.

    "orthostochastic" squares the entries of B (I - A)⁻¹(I + A), A = tril(Y) - tril(Y)ᵀ: exact, without iterations, zeros are
    possible. B is found by alternating projections. Permutations are kept, but have a gradient of 0; from size 3 on not every
    weight can be reached. One that was computed before may come back as another, the more so the larger it is.

    Raises:
        ValueError: unknown map; the weight is not square; ``name`` as for :func:`stiefel`.
    """
    if map not in get_args(DoublyStochasticMap):
        raise ValueError(f"unknown map {map!r}; choose one of {', '.join(get_args(DoublyStochasticMap))}")
    shape, weight = Layout.of(module, name).shape, getattr(module, name).detach()
    if shape[-1] != shape[-2]:
        raise ValueError(
            f"expected {type(module).__name__}.{name} to be square, got {tuple(shape)}; choose another shape"
        )
    eye = precision.eye_like(weight.to(precision.compute_dtype(weight.dtype))).expand(shape).clone()
    return register(module, name, DoublyStochastic(weight.dtype, None if map == "sinkhorn" else eye))
