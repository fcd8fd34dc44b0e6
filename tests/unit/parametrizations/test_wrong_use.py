"""Uses that look right and are not, each with an error or a warning that says what to do."""

from typing import Any

import pytest
import torch
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


def test_bounds_need_no_values() -> None:
    with FakeTensorMode():
        pit: Any = mt.PIT(32, 8, memory="frozen", bounds=(0.1, 10.0))
    assert pit.memory.shape == (32, 8)


def test_what_fits_a_memory_is_named_when_adamw_moves_it() -> None:
    pit = mt.PIT(32, 8, memory="trainable")
    pit.embed(torch.arange(4)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"PIT\(memory='free'\) in place of another memory"):
        torch.optim.AdamW(pit.parameters(), lr=0.1).step()
