"""What the tests of constrained layers share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import manifold_tying as mt

ORTHONORMAL: dict[str, Callable[..., Any]] = {
    "stiefel": mt.stiefel,
    "stiefel, cayley": partial(mt.stiefel, retraction="cayley"),
    **{kind: partial(mt.orthogonal, map=kind) for kind in ("polar", "qr", "cayley", "cayley-neumann")},
}


class Stack(nn.Module):
    """Three 5 x 4 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def stored(module: Any, name: str = "weight") -> nn.Parameter:
    original = module.parametrizations[name].original
    assert isinstance(original, nn.Parameter)
    return original


def assert_one_graph(module: Any, x: Tensor, *changes: Callable[[Any], object]) -> None:
    """Compiled as a whole the layer is the eager one, before and after a change of what it stores."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        outputs, gradients = [], []
        for layer in (module, compiled):
            module.zero_grad()
            outputs.append(layer(x))
            outputs[-1].square().sum().backward()
            gradients.append(stored(module).grad)
        assert gradients[0] is not None
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
        for change in changes:
            change(module)
