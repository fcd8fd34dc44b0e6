"""Uses that look right and are not, each with an error or a warning that says what to do."""

import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn

import manifold_tying as mt
from manifold_tying.tying import Memory


def test_a_plain_state_dict_of_a_constrained_layer() -> None:
    model: Any = nn.Sequential(mt.stiefel(nn.Linear(4, 8)))
    plain = {"0.weight": torch.randn(8, 4), "0.bias": torch.zeros(8)}
    with pytest.raises(RuntimeError, match=r"0.weight is constrained here .* module.weight = state\['0.weight'\]"):
        model.load_state_dict(plain)
    model[0].weight = plain["0.weight"]
    assert mt.linalg.defect(model[0].weight.detach()) < 1e-6
    rnn: Any = nn.RNN(4, 4)
    state = rnn.state_dict()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        mt.orthogonal(rnn, name)
    with pytest.raises(RuntimeError) as raised:
        rnn.load_state_dict(state)
    assert str(raised.value).count("is constrained here") == 2, "each weight once"


@pytest.mark.parametrize("constrain", [mt.stiefel, mt.orthogonal, lambda t: mt.spd(t, "weight"), mt.equivalence])
def test_a_tensor_in_place_of_a_layer(constrain: Any) -> None:
    with pytest.raises(
        ValueError, match=r"expected a layer \(nn.Module\), got a Tensor; .* geoopt.ManifoldParameter\(tensor"
    ):
        constrain(torch.eye(4))


def test_what_fits_a_memory_is_named_when_adamw_moves_it() -> None:
    pit = mt.PIT(32, 8, memory="trainable")
    pit.embed(torch.arange(4)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"PIT\(memory='free'\) in place of another memory"):
        torch.optim.AdamW(pit.parameters(), lr=0.1).step()


@pytest.mark.parametrize("memory", get_args(Memory))
def test_logits_in_the_place_of_hidden_states(memory: Memory) -> None:
    pit = mt.PIT(32, 8, memory=memory)
    logits = pit.logits(torch.randn(3, 8))
    for use in (pit.logits, lambda wrong: pit.loss(wrong, torch.arange(3))):
        with pytest.raises(ValueError, match=r"expected hidden states \(..., 8\), not logits, got \(3, 32\)"):
            use(logits)


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda: mt.PIT(8, 4, std=float("nan")), "expected a positive, finite std, got nan"),
        (
            lambda: mt.pit_schedule(torch.optim.SGD([torch.ones(1)]), steps=0),
            "expected steps to be an integer >= 1, got 0",
        ),
        (lambda: mt.orthogonal(nn.Embedding(9, 4, sparse=True)), "Embedding has sparse gradients"),
        (lambda: mt.optim.RiemannianSGD([{"params": [torch.ones(2)], "scale": 2.0}]), "expected a tensor as the scale"),
    ],
)
def test_wrong_values(use: Callable[[], Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        use()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "manifold_tying.optim.trainer_callback", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'manifold-tying\[huggingface\]'"):
        _ = mt.optim.MergeCallback
