"""transform="rotation": a model that cannot be converted so is as it was, and what can is turned whole."""

import copy
from typing import Any

import peft
import pytest
import torch
from huggingface_models import build, difference, ids, logits, stays_as_it_was
from torch import nn

import manifold_tying as mt

# transformers 5.23 renames what PEFT 0.21 calls
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def duplicate_column(model: Any) -> None:
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[:, 3] = table[:, 4]


@pytest.mark.parametrize(
    ("changes", "damage", "options", "reason"),
    [
        ({}, None, {"source": "typo"}, "source"),
        ({}, duplicate_column, {}, "full column rank"),
        ({"tie_word_embeddings": False}, None, {}, "source="),
    ],
)
def test_what_is_refused_later_is_not_rotated(
    changes: dict[str, Any], damage: Any, options: dict[str, Any], reason: str
) -> None:
    model = build(**changes)
    if damage is not None:
        damage(model)
    stays_as_it_was(model, reason, transform="rotation", **options)


def test_two_equal_tables_are_one() -> None:
    model = build()
    before = logits(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    assert difference(logits(mt.convert(model, transform="rotation")), before) <= 1e-4


def test_a_model_in_bfloat16_is_rotated() -> None:
    model = build()
    with torch.no_grad():
        for name, gain in model.named_parameters():
            if "layernorm" in name:  # the final norm's gain is approximated
                gain.copy_(torch.linspace(0.1, 3, len(gain)))
    before = logits(model)
    rotated = mt.convert(model.bfloat16(), transform="rotation")
    assert rotated.dtype == torch.bfloat16 and difference(logits(rotated), before) < 0.05


def with_lora(model: Any) -> None:
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("self_attn.q_proj", lambda model: mt.orthogonal(model.model.layers[0].self_attn.q_proj)),
        ("mlp.down_proj", lambda model: mt.equivalence(model.model.layers[1].mlp.down_proj, block_size=8)),
        ("self_attn.v_proj", with_lora),
    ],
)
def test_constrained_and_adapted_layers_are_refused(name: str, change: Any) -> None:
    model = build()
    change(model)
    before = logits(model)
    with pytest.raises(ValueError, match=f"plain nn.Linear.*{name}"):
        mt.convert(model, transform="rotation")
    assert torch.equal(logits(model), before)
    assert "rotation" not in mt.conversion_losses(model, {"input_ids": ids()})
    assert logits(mt.convert(copy.deepcopy(model))).isfinite().all()  # the others leave the body alone


def test_rotation_scales_go_with_adapters_on_the_body() -> None:
    model = mt.convert(build(), transform="rotation")
    plain = mt.huggingface.rotation_scales(model)
    with_lora(model)
    for name in plain:
        model.get_parameter(name).requires_grad_(True)
    assert mt.huggingface.rotation_scales(model).keys() == plain.keys()
