"""The blocks of all layers of a model with PoetConfig, computed together for a call of the model without gradients."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from manifold_tying.peft import PoetConfig

IDS = torch.tensor([[1, 5, 2, 8, 3], [0, 4, 4, 9, 7]])
OPTIONS: dict[str, dict[str, Any]] = {
    "both": {"block_size": 8},
    "ragged": {"block_size": 7, "permute": True, "magnitude": True},
    "in": {"block_size": 4, "sides": "in", "map": "series"},
    "share": {"block_size": 8, "block_share": True, "map": "exp"},
}
# Names that transformers renamed, read by PEFT.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")


class Counted(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **kwargs or {})


def adapted(layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    found = get_peft_model(model, PoetConfig(target_modules="all-linear", init_weights=False, **options))
    return found.train()


def gradients(model: Any, call: Any) -> list[Tensor]:
    model.zero_grad()
    loss = call(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *found]


@pytest.mark.parametrize("checkpoint", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_each_layer_alone(option: str, checkpoint: dict[str, Any] | None) -> None:
    model = adapted(**OPTIONS[option])
    alone = gradients(model, model.get_base_model())
    if checkpoint:
        model.gradient_checkpointing_enable(checkpoint)
        model.enable_input_require_grads()
        torch.testing.assert_close(gradients(model, model.get_base_model()), alone, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients(model, model), alone, rtol=1e-4, atol=1e-6)
    assert all(g.abs().max() > 0 for g in alone)


def test_one_map_for_all_layers_and_all_tokens() -> None:
    def inverses(layers: int, tokens: int) -> int:
        with Counted() as counted, torch.no_grad():
            adapted(layers, block_size=8).generate(input_ids=IDS, max_new_tokens=tokens, min_new_tokens=tokens)
        return counted.counts["linalg_inv_ex"]

    assert inverses(1, 1) == inverses(3, 4) == 1


def test_a_vector_that_changes_in_the_call_counts_as_it_is() -> None:
    model = adapted(block_size=8)
    changed = copy.deepcopy(model)
    layers = [each.get_base_model().model.layers[1].mlp.up_proj for each in (model, changed)]

    def double(layer: Any, _: Any = None) -> None:
        layer.poet_skew["default"].mul_(2)

    with torch.no_grad():
        double(layers[1])
        layers[0].register_forward_pre_hook(double)
        torch.testing.assert_close(model(input_ids=IDS).logits, changed(input_ids=IDS).logits)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_layers_have_graphs_of_their_own() -> None:
    model: Any = get_peft_model(Two(), PoetConfig(block_size=4, target_modules=["first", "second"], init_weights=False))
    vectors = [p for p in model.parameters() if p.requires_grad]

    def reached() -> list[bool]:
        return [p.grad is not None and bool(p.grad.any()) for p in vectors]

    first, second = model(torch.randn(3, 8))
    first.square().sum().backward()
    assert reached() == [True, False] and vectors[1].grad is None
    second.square().sum().backward()
    assert reached() == [True, True]


def test_a_layer_that_turns_gradients_on_gets_them() -> None:
    model = adapted(block_size=8)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    found: list[Tensor] = []

    def call(layer: Any, args: Any, _: Any) -> None:
        with torch.enable_grad():
            found.append(layer.forward(*args))

    layer.register_forward_hook(call)
    with torch.no_grad():
        model(input_ids=IDS)
    found[0].sum().backward()
    assert layer.poet_skew["default"].grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
def test_a_compiled_model_is_one_graph() -> None:
    model = adapted(1, block_size=7)  # seven layers, whose blocks are computed together
    whole = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(input_ids=IDS).logits, model(input_ids=IDS).logits)
