"""Uses that look right and are not, each with an error or a warning that says what to do."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import manifold_tying as mt


def test_a_plain_state_dict_of_a_constrained_layer() -> None:
    model: Any = nn.Sequential(mt.stiefel(nn.Linear(4, 8)))
    plain = {"0.weight": torch.randn(8, 4), "0.bias": torch.zeros(8)}
    with pytest.raises(RuntimeError, match=r"0.weight is constrained here .* module.weight = state\['0.weight'\]"):
        model.load_state_dict(plain)
    model[0].weight = plain["0.weight"]
    assert mt.linalg.defect(model[0].weight.detach()) < 1e-6


def test_the_three_matrices_of_attention_are_named() -> None:
    attention = nn.MultiheadAttention(8, 2)
    with pytest.warns(UserWarning, match=r"in_proj_weight stacks 3 matrices .* pass blocks=3"):
        mt.stiefel(attention, "in_proj_weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.stiefel(nn.MultiheadAttention(8, 2), "in_proj_weight", blocks=3)


@pytest.mark.parametrize("damage", ["surplus", "nothing"])
def test_adapters_hold_what_they_describe(damage: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    tuned = copy.deepcopy(model)
    mt.equivalence_(tuned, block_size=4, verbose=False)
    path = mt.save_adapter(tuned, tmp_path / "adapter.safetensors")
    tensors, described = load_file(path), "{}"
    if damage == "surplus":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            described = file.metadata()["equivalences"]
        tensors["other"] = torch.zeros(1)
    save_file(tensors, path, {"format": "manifold-tying equivalence adapter 1", "equivalences": described})
    with pytest.raises(ValueError, match=r"is damaged: it describes \d weights and has \d tensors"):
        mt.load_adapter(model, path)
    assert not list(mt.parametrizations.constraints(model))


def test_bounds_need_no_values() -> None:
    with FakeTensorMode():
        pit: Any = mt.PIT(32, 8, memory="frozen", bounds=(0.1, 10.0))
    assert pit.memory.shape == (32, 8)


def test_what_fits_a_memory_is_named_when_adamw_moves_it() -> None:
    pit = mt.PIT(32, 8, memory="trainable")
    pit.embed(torch.arange(4)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"PIT\(memory='free'\) in place of another memory"):
        torch.optim.AdamW(pit.parameters(), lr=0.1).step()
