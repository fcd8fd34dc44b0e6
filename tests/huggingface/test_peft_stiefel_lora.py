"""StiefelLoraConfig as a method of PEFT: orthonormal factors in training, and adapters that plain LoRA reads."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from manifold_tying import linalg
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.peft import StiefelLoraConfig, StiefelLoraModel, export_lora

TARGETS = ["q_proj", "down_proj", "c_attn", "first", "last"]
IDS = torch.tensor([[1, 5, 2, 8, 3], [0, 4, 4, 9, 7]])
IMAGES = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    ),
    "convolutions": lambda: nn.Sequential(
        OrderedDict(first=nn.Conv2d(3, 8, 3), mid=nn.Tanh(), last=nn.Conv2d(8, 2, 2))
    ),
}
# PEFT reads a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def output(model: Any) -> Tensor:
    plain = isinstance(model.get_base_model() if hasattr(model, "get_base_model") else model, nn.Sequential)
    return model(IMAGES) if plain else model(input_ids=IDS).logits


def trained(kind: str) -> tuple[Any, Any, list[float]]:
    """The base model, and a copy with an adapter after some steps."""
    base = MODELS[kind]().eval()
    config = StiefelLoraConfig(r=4, target_modules=TARGETS, fan_in_fan_out=kind == "gpt2")
    model = get_peft_model(copy.deepcopy(base), config).eval()
    torch.testing.assert_close(output(model), output(base), rtol=0, atol=0)
    optimizer = RiemannianAdam(param_groups(model, manifold_lr=1e-2), lr=3e-2)
    losses = []
    for _ in range(8):
        loss = (output(model) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return base, model, losses


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_train_on_the_manifold_and_are_saved_merged_and_exported(kind: str, tmp_path: Path) -> None:
    base, model, losses = trained(kind)
    assert losses[-1] < losses[0]
    layers: list[Any] = [part for part in model.modules() if hasattr(part, "lora_B")]
    for layer in layers:
        B, A = layer.lora_B["default"].weight.flatten(1), layer.lora_A["default"].parametrizations.weight
        for point in (B if B.shape[0] >= B.shape[1] else B.T, A.original0, A.original1):
            assert linalg.defect(point.detach()) < 1e-6
        assert A.original2.abs().min() > 0
    found = output(model).detach()
    assert (found - output(base)).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "own")
    export_lora(model, tmp_path / "lora")
    for folder, kept, lazily in (
        ("own", StiefelLoraConfig, False), ("own", StiefelLoraConfig, True), ("lora", LoraConfig, False)
    ):  # fmt: skip
        loaded: Any = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / folder, low_cpu_mem_usage=lazily).eval()
        assert type(loaded.peft_config["default"]) is kept
        torch.testing.assert_close(output(loaded), found, rtol=0, atol=2e-6)
    config = StiefelLoraConfig(r=2, target_modules=TARGETS, fan_in_fan_out=kind == "gpt2")
    other: Any = get_peft_model(copy.deepcopy(base), config).eval()
    assert not other.load_adapter(tmp_path / "own", "second").missing_keys
    other.set_adapter("second")
    torch.testing.assert_close(output(other), found, rtol=0, atol=2e-6)
    with model.disable_adapter():
        torch.testing.assert_close(output(model), output(base), rtol=0, atol=1e-7)
    plain = model.merge_and_unload()
    assert plain.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(output(plain), found, rtol=0, atol=1e-5)


WITH_MORE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}),
    ("llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("convolutions", {"lora_bias": True}),
]


@pytest.mark.parametrize(("kind", "more"), WITH_MORE)
def test_an_export_has_all_that_the_adapter_trains(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    base: Any = MODELS[kind]().eval()
    if "ensure_weight_tying" in more:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    config = StiefelLoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **more)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.requires_grad and "parametrizations" not in key:
                p.add_(0.1)
    export_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-5)


def test_a_plain_optimizer_is_warned_of() -> None:
    model = get_peft_model(MODELS["llama"](), StiefelLoraConfig(r=4, target_modules=TARGETS))
    optimizer = torch.optim.AdamW(model.parameters())
    output(model).sum().backward()
    with pytest.warns(UserWarning, match="AdamW moved .*without its manifold"):
        optimizer.step()


def test_a_bfloat16_base_has_float32_factors() -> None:
    model = get_peft_model(MODELS["llama"]().bfloat16(), StiefelLoraConfig(r=4, target_modules=TARGETS))
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    assert output(model).dtype == torch.bfloat16


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: StiefelLoraConfig(init_lora_weights="pissa"), "init_lora_weights True or False.*'pissa'"),
    (
        lambda: get_peft_model(MODELS["llama"](), StiefelLoraConfig(target_modules=["q_proj", "embed_tokens"])),
        "layers with a product, got 'embed_tokens'",
    ),
    (
        lambda: StiefelLoraModel(
            MODELS["llama"](), StiefelLoraConfig(target_modules=["q_proj"]), "default"
        ).add_weighted_adapter(["default"], [1.0], "sum"),
        "no weighted sum",
    ),
    (
        lambda: export_lora(get_peft_model(MODELS["llama"](), LoraConfig(target_modules=["q_proj"])), "nowhere"),
        "expected a StiefelLora adapter, got LoraConfig",
    ),
    (
        lambda: export_lora(
            get_peft_model(MODELS["llama"](), LoraConfig(target_modules=["q_proj"])), "nowhere", "mine"
        ),
        r"got None as 'mine' of \['default'\]",
    ),
]


@pytest.mark.parametrize(("use", "message"), WRONG)
def test_wrong_use(use: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        use()
    assert not list(tmp_path.iterdir())
