"""Doubly stochastic weights: what becomes of a given weight, and what is refused."""

from typing import Any, cast

import pytest
import torch
from layers import Stack, assert_one_graph, stored
from torch import Tensor, nn

import manifold_tying as mt


def linear(weight: Tensor) -> Any:
    layer = nn.Linear(len(weight), len(weight), dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def circulant(*first: float) -> Tensor:
    """Doubly stochastic if its first row sums to 1."""
    return torch.stack([torch.tensor(first).roll(i) for i in range(len(first))])


@pytest.mark.parametrize("weight", [circulant(0.5, 0.3, 0.2), circulant(0.5, 0.5, 0.0), torch.eye(3)])
def test_a_doubly_stochastic_weight_is_kept(weight: Tensor) -> None:
    for given in (weight, 5 * weight, 1e-9 * weight):
        layer = mt.doubly_stochastic(linear(given))
        torch.testing.assert_close(layer.weight, weight, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="expected a finite matrix"):
        layer.weight = torch.full((3, 3), torch.inf)
    layer.weight = circulant(0.1, 0.2, 0.7)
    torch.testing.assert_close(layer.weight, circulant(0.1, 0.2, 0.7))


def test_nonnegative_rows_are_scaled_and_zeros_count_as_equal() -> None:
    third = torch.full((3, 3), 1 / 3)
    torch.testing.assert_close(mt.doubly_stochastic(linear(torch.zeros(3, 3))).weight, third)
    ones = torch.ones(3, 3)
    ones[1] = 0
    torch.testing.assert_close(mt.doubly_stochastic(linear(ones)).weight, third)


def test_a_signed_weight_is_the_stored_one() -> None:
    given = torch.randn(3, 3)
    layer = mt.doubly_stochastic(linear(given))
    assert torch.equal(stored(layer), given)
    torch.testing.assert_close(layer.weight, mt.linalg.sinkhorn(given))
    rounded = circulant(0.6, 0.4, -1e-9)
    layer.weight = rounded
    torch.testing.assert_close(layer.weight, rounded, rtol=0, atol=1e-6)
    negative_row = torch.ones(3, 3)
    negative_row[0] = -1
    layer.weight = negative_row
    torch.testing.assert_close(layer.weight, torch.full((3, 3), 1 / 3))  # e^W has rank 1


def test_an_orthostochastic_weight_starts_from_the_given_one_and_cannot_be_assigned() -> None:
    given = torch.randn(3, 3)
    layer = mt.doubly_stochastic(linear(given), map="orthostochastic")
    before = layer.weight.detach()
    torch.testing.assert_close(before, mt.linalg.orthostochastic(given))
    with pytest.raises(ValueError, match="an orthostochastic weight cannot be assigned; load a state dict"):
        layer.weight = before
    other = mt.doubly_stochastic(linear(torch.zeros(3, 3)), map="orthostochastic")
    assert torch.equal(other.weight, torch.eye(3))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, before)
    with pytest.raises(RuntimeError, match=r"expected the state of doubly_stochastic\(map='sinkhorn'\)"):
        mt.doubly_stochastic(nn.Linear(3, 3)).load_state_dict(layer.state_dict())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("map", ["sinkhorn", "orthostochastic"])
def test_a_compiled_layer_of_bfloat16_and_a_stack(map: Any) -> None:
    layer = mt.doubly_stochastic(nn.Linear(4, 4), map=map)
    assert_one_graph(layer, torch.randn(5, 4))
    layer.bfloat16()
    assert (layer.weight.dtype, stored(layer).dtype) == (torch.bfloat16, torch.float32)
    stack: Any = Stack()
    stack.weight = nn.Parameter(torch.randn(3, 4, 4))
    mt.doubly_stochastic(stack, map=map)
    sums = stack.weight.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nn.Linear(4, 3), {}, r"expected a square matrix \(..., b, b\), got \(3, 4\)"),
        (nn.Linear(4, 4), {"name": "bias"}, "expected"),
        (nn.Linear(4, 4), {"map": cast(Any, "softmax")}, "unknown map 'softmax'; choose one of sinkhorn, ortho"),
        (linear(torch.full((4, 4), torch.inf)), {}, "expected Linear.weight to be finite"),
        (linear(torch.full((4, 4), torch.nan)), {"map": "orthostochastic"}, "expected Linear.weight to be finite"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(layer: Any, options: Any, message: str) -> None:
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    with pytest.raises(ValueError, match=message):
        mt.doubly_stochastic(layer, **options)
    for name, p in layer.named_parameters():
        assert torch.equal(p.nan_to_num(), before[name].nan_to_num())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_an_expanded_weight_is_stored_with_memory_of_its_own() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.rand(1, 4).expand(4, 4))
    mt.doubly_stochastic(layer, map="orthostochastic")
    Y = stored(layer)
    with torch.no_grad():
        Y[0, 0] = 2.0
    assert Y[1, 0] != 2.0
