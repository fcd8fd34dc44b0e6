"""What strengthens plain token tables, so that PIT is compared with the best of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from training_runs import config, text

import manifold_tying as mt
from manifold_tying.models import Llama, preset
from manifold_tying.training import Settings, TrainConfig, load_model, train
from manifold_tying.training.sections import Interface

V, D = 40, 8


def halves_of_the_gradient(**options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of one loss in the table, its lookup's part and its head's part, the parts from two separate tables."""
    torch.manual_seed(0)
    tied = mt.TransposeTying(V, D, std=0.5, **options).double()
    ids, targets = torch.randint(V, (2, 12))
    tied.loss(torch.tanh(tied.embed(ids)), targets).backward()
    embedding, head = (tied.weight.detach().clone().requires_grad_() for _ in range(2))
    F.cross_entropy(torch.tanh(embedding[ids]) @ head.T, targets).backward()
    assert tied.weight.grad is not None and embedding.grad is not None and head.grad is not None
    return tied.weight.grad, embedding.grad, head.grad


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_input_gradient_scale_multiplies_the_lookups_part(scale: float) -> None:
    found, lookup, head = halves_of_the_gradient(input_gradient_scale=scale)
    torch.testing.assert_close(found, scale * lookup + head, rtol=1e-12, atol=1e-15)
    assert (found - lookup - head).norm() > 0.1 * lookup.norm()


@pytest.mark.parametrize("interface", [mt.Untied, mt.TransposeTying])
def test_a_learned_scale_multiplies_the_logits_on_every_route(interface: Any) -> None:
    plain, scaled = interface(V, D, std=0.5), interface(V, D, std=0.5, logit_scale=True)
    scaled.load_state_dict({**plain.state_dict(), "log_scale": torch.tensor([0.7])})
    hidden, targets = torch.randn(6, D), torch.randint(V, (6,))
    expected = torch.tensor(0.7).exp() * plain.logits(hidden)
    torch.testing.assert_close(scaled.logits(hidden), expected)
    torch.testing.assert_close(hidden @ scaled.materialize()[1], expected)
    loss = scaled.loss(hidden, targets)
    torch.testing.assert_close(loss, F.cross_entropy(expected, targets))
    loss.backward()
    log_scale = torch.tensor(0.7, requires_grad=True)
    F.cross_entropy(log_scale.exp() * plain.logits(hidden).detach(), targets).backward()
    assert log_scale.grad is not None
    torch.testing.assert_close(scaled.log_scale.grad, log_scale.grad[None])
    scaled.reset_parameters()
    assert scaled.log_scale.item() == 0.0


def test_embedding_scale_multiplies_after_the_norm() -> None:
    config = dataclasses.replace(preset("nano"), vocab_size=V, num_layers=1, embedding_norm=True, embedding_scale=3.0)
    model = Llama(config, mt.Untied(V, config.hidden_size))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.hidden(torch.arange(6)[None])
    torch.testing.assert_close(seen[0].square().mean(-1).sqrt(), torch.full((1, 6), 3.0))


@pytest.mark.parametrize("scale", [-1.0, float("inf")])
def test_a_scale_that_is_no_factor_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="input_gradient_scale"):
        mt.TransposeTying(V, D, input_gradient_scale=scale)


def test_settings_of_plain_tables_are_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="input_gradient_scale belongs to"):
        TrainConfig(out=tmp_path, interface="untied", settings=Settings(input_gradient_scale=2.0))
    apart: tuple[Interface, ...] = ("pit-frozen", "pit-trainable")
    for interface in apart:
        with pytest.raises(ValueError, match="table_lr belongs to transpose and untied and pit-free"):
            TrainConfig(out=tmp_path, interface=interface, settings=Settings(table_lr=0.1))
    with pytest.raises(ValueError, match="logit_scale belongs to"):
        TrainConfig(out=tmp_path, interface="pit-trainable", settings=Settings(logit_scale=True))


def test_train_and_load_the_baselines(tmp_path: Path) -> None:
    changes = dict(steps=2, embedding_scale=11.3, input_gradient_scale=5.0, logit_scale=True)
    train(config(tmp_path / "run", text(tmp_path), "transpose", **changes))
    model = load_model(tmp_path / "run")
    assert isinstance(model, Llama) and isinstance(model.interface, mt.TransposeTying)
    assert model.config.embedding_scale == 11.3 and model.interface.input_gradient_scale == 5.0
    assert model.interface.log_scale is not None and model.interface.log_scale.item() != 0
