"""Linear layers under an equivalence share a class, which nothing that torch does to one of them takes from the others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

import manifold_tying as mt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def graphs(constrain: Callable[[nn.Module], object]) -> int:
    """How many graphs three blocks compile to."""
    torch._dynamo.reset()
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        constrain(block)
    counter = CompileCounterWithBackend("eager")
    x = torch.randn(5, 8)
    with torch.no_grad():  # else the first input is the only one without a gradient, and takes a graph of its own
        for block in blocks:
            x = torch.compile(block, backend=counter, fullgraph=True)(x)
    return counter.frame_count


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_blocks_of_one_shape_share_a_graph() -> None:
    assert graphs(lambda block: mt.equivalence_(block, block_size=4, verbose=False)) == 1
    # what torch's classes lead to
    assert graphs(lambda block: [mt.orthogonal(layer) for layer in block.children()]) == 3


def pair() -> tuple[Any, Any]:
    one, other = (mt.equivalence(nn.Linear(6, 6), block_size=3, seed=seed) for seed in range(2))
    assert type(one) is type(other) is not nn.Linear
    return one, other


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


REMOVED: dict[str, Callable[[nn.Module], object]] = {
    "materialize": mt.materialize,
    "torch": lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    "torch, copy": lambda layer: parametrize.remove_parametrizations(copy.deepcopy(layer), "weight"),
}


@pytest.mark.parametrize("way", REMOVED)
def test_removing_one_leaves_the_others(way: str) -> None:
    layer, other = pair()
    x = torch.randn(3, 6)
    weight, expected, of_other = layer.weight.detach().clone(), layer(x), other(x)
    REMOVED[way](layer)
    assert (type(layer) is nn.Linear) == (way != "torch, copy")
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(other(x), of_other) and other.weight.shape == (6, 6)


def test_a_second_parametrization_of_one_is_not_the_others() -> None:
    layer, other = pair()
    x, bias, weight = torch.randn(3, 6), layer.bias.detach().clone(), layer.weight.detach().clone()
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Twice())
    assert torch.equal(layer.bias, 2 * bias) and isinstance(other.bias, nn.Parameter)
    torch.testing.assert_close(layer(x), F.linear(x, 2 * weight, 2 * bias))
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(layer, name)
    assert type(layer) is nn.Linear and other(x).shape == (3, 6)
