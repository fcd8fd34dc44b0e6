"""PEFT's PeftMixedModel, which admits PEFT's own methods only: it refuses ours unchanged, and mixes what we export."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftMixedModel, get_peft_model
from torch import nn

from manifold_tying.peft import PoetConfig, StiefelLoraConfig, export_lora

X = torch.linspace(-1, 1, 48).view(4, 12)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("config", [PoetConfig(target_modules=["0"]), StiefelLoraConfig(r=2, target_modules=["0"])])
def test_own_methods_are_refused_before_anything_is_changed(config: PeftConfig, tmp_path: Path) -> None:
    base = plain()
    get_peft_model(plain(), config).save_pretrained(str(tmp_path))
    mixed: Any = get_peft_model(plain(), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), mixed=True)
    expected, names, methods = mixed(X), list(mixed.state_dict()), dict(mixed.peft_config)
    for use in (
        lambda: get_peft_model(base, config, mixed=True),
        lambda: PeftMixedModel.from_pretrained(base, tmp_path),
        lambda: mixed.add_adapter("second", config),
        lambda: mixed.load_adapter(tmp_path, "second"),
    ):
        with pytest.raises(ValueError, match=r"(is not compatible|is not supported)"):
            use()
    assert [type(part) for part in base] == [nn.Linear, nn.Tanh, nn.Linear]
    assert list(mixed.state_dict()) == names and mixed.peft_config == methods and torch.equal(mixed(X), expected)


def test_an_exported_adapter_and_a_merged_rotation_are_mixed(tmp_path: Path) -> None:
    """y = (R W0 P + U S Vᵀ + LoHa's update) x, each part from the model that has it alone."""
    torch.manual_seed(1)
    rotated = get_peft_model(plain(), PoetConfig(block_size=4, target_modules=["0"], init_weights=False))
    base: Any = rotated.merge_and_unload()
    config = StiefelLoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    stiefel: Any = get_peft_model(copy.deepcopy(base), config)
    export_lora(stiefel, tmp_path)
    other = LoHaConfig(r=2, target_modules=["0"], init_weights=False)
    mixed: Any = PeftMixedModel.from_pretrained(copy.deepcopy(base), tmp_path, "stiefel")
    mixed.add_adapter("loha", other)
    alone = {"stiefel": stiefel.base_model.model[0](X) - base[0](X)}
    mixed.set_adapter("loha")
    alone["loha"] = mixed.base_model.model[0](X) - base[0](X)
    mixed.set_adapter(["stiefel", "loha"])
    assert min(part.abs().max() for part in alone.values()) > 1e-2
    both = mixed.base_model.model[0](X)
    torch.testing.assert_close(both, base[0](X) + alone["stiefel"] + alone["loha"], rtol=0, atol=1e-6)
    found = mixed(X)
    with mixed.disable_adapter():
        assert torch.equal(mixed(X), base(X))
    torch.testing.assert_close(mixed.merge_and_unload()(X), found, rtol=0, atol=1e-6)
