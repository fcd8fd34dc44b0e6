"""Constrained layers inside a model of transformers, which reads and writes tensors by their names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import manifold_tying as mt

FIRST = transformers.__version__ == "5.0.0"
UNSORTED = "transformers 5.0.0 cannot sort the names of a parametrization: weight.original and weight.0.form"

MAKERS: dict[str, Callable[[nn.Linear], Any]] = {
    "equivalence": lambda layer: mt.equivalence(layer, block_size=4),
    "stiefel": mt.stiefel,
    "orthogonal": mt.orthogonal,
    "cayley": lambda layer: mt.orthogonal(layer, map="cayley"),
}


class Config(PretrainedConfig):
    model_type = "probe"

    def __init__(self, kind: str = "stiefel", head: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.kind, self.head = kind, head


class Probe(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.body = nn.Linear(8, 8)
        if config.head:
            self.head: Any = MAKERS[config.kind](nn.Linear(8, 16))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


@pytest.mark.skipif(FIRST, reason=UNSORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_saved_model_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = Probe(Config(kind))
    model.to(dtype)
    stored = model.head.parametrizations.weight.original
    if kind != "stiefel":
        stored.data += 0.1 * torch.randn_like(stored)
    model.save_pretrained(tmp_path)
    again = Probe.from_pretrained(tmp_path, dtype=dtype)
    torch.testing.assert_close(again.head.weight, model.head.weight, rtol=0, atol=0 if dtype == torch.float32 else 1e-2)
    other = next(name for name in MAKERS if name != kind)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # the report above names the form
        Probe.from_pretrained(tmp_path, dtype=dtype, config=Config(other))


@pytest.mark.filterwarnings("ignore:.*newly initialized")
@pytest.mark.parametrize(
    "kind", [kind for kind in MAKERS if kind != "equivalence"]
)  # its permutations would be empty memory
def test_a_new_constrained_layer_on_a_saved_body(kind: str, tmp_path: Path) -> None:
    """transformers fills the layer that the checkpoint lacks with empty memory: it says so, and the form is kept."""
    Probe(Config(head=False)).save_pretrained(tmp_path)
    model = Probe.from_pretrained(tmp_path, config=Config(kind))
    model.head.weight = torch.randn(16, 8)
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", MAKERS)
def test_accelerate_offloads(kind: str) -> None:
    layer = MAKERS[kind](nn.Linear(8, 16))
    x = torch.randn(3, 8)
    expected = layer(x)
    model = cpu_offload(nn.Sequential(layer), torch.device("cpu"))
    torch.testing.assert_close(model(x), expected)
