"""Doubly stochastic weights: nonnegative, rows and columns sum to 1."""

from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from manifold_tying import autograd, distributed, linalg, precision
from manifold_tying.parametrizations._constraint import Constraint
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._register import register

M = TypeVar("M", bound=nn.Module)
DoublyStochasticMap = Literal["sinkhorn", "orthostochastic"]


class DoublyStochastic(Constraint):
    """The weight is sinkhorn(Y) or orthostochastic(Y) of the stored Y (..., n, n)."""

    call = "doubly_stochastic"

    def __init__(self, dtype: torch.dtype, map: DoublyStochasticMap) -> None:
        super().__init__(dtype)
        self.map = map

    def extra_repr(self) -> str:
        return f"map={self.map!r}"

    def forward(self, stored: Tensor) -> Tensor:
        function = linalg.sinkhorn if self.map == "sinkhorn" else linalg.orthostochastic
        return function(distributed.full_tensor(stored)).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        if autograd.has_data(weight):
            precision.check_finite(weight)
        if self.map == "orthostochastic":
            if "form" not in self._buffers:  # the first weight
                return weight.contiguous()  # an expanded one shares memory between entries
            raise ValueError("an orthostochastic weight cannot be assigned; load a state dict, or use map='sinkhorn'")
        largest, eps = weight.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30), torch.finfo(weight.dtype).eps
        signed = weight.amin((-2, -1), keepdim=True) < -1e-3 * largest
        return torch.where(signed, weight, weight.maximum(eps * largest).log())


def doubly_stochastic(module: M, name: str = "weight", *, map: DoublyStochasticMap = "sinkhorn") -> M:
    """Make the square matrices (..., n, n) of ``module.name`` doubly stochastic; any optimizer trains the free Y behind them.

    "sinkhorn" scales e^Y (:func:`manifold_tying.linalg.sinkhorn`) and reaches every positive one. The given weight W and every
    assigned one are scaled: Y = log W, where entries below eps times the largest, 1e-7 in float32, are raised to that. So a
    doubly stochastic W is kept to rounding, and W = 0 becomes 1/n. Entries of the identity hardly have a gradient: start from
    0.9 I + 0.1/n, say. A W with an entry below -0.001 of the largest, such as nn.Linear's default, is near none: it becomes Y.

    "orthostochastic" squares the entries of a rotation (:func:`manifold_tying.linalg.orthostochastic`): exact, without
    iterations, zeros are possible. The given weight becomes Y; a symmetric one gives the identity, where the gradient is 0.
    From n = 3 on some doubly stochastic matrices are no such squares, so assigning a weight is refused.

    Raises:
        ValueError: unknown map; the weight is not square or not finite; ``name`` as for :func:`stiefel`.
    """
    precision.check_choice("map", map, DoublyStochasticMap)
    Layout.of(module, name)
    precision.check_square(weight := getattr(module, name))
    return register(module, name, DoublyStochastic(weight.dtype, map))
