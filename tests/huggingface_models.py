"""Tiny untrained models of each kind that the tests convert, built from their configurations, without a network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.tying import FreePIT, PITEmbedding

V, D = 96, 16

_BODY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BERT = {name: _BODY[name] for name in _BODY if name not in ("num_key_value_heads", "tie_word_embeddings")}
_PLAIN_HEADS = {**_BODY, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip

_HYBRID = {
    "layer_types": ["attention", "attention"], "mamba_n_heads": 4, "num_local_experts": 0, "shared_intermediate_size": 24,
    "embedding_multiplier": 12.0, "logits_scaling": 6.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _BODY),
    "Qwen3": ("Qwen3", {**_BODY, "head_dim": 8}),
    "Granite": ("Granite", {**_BODY, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        _BODY | _HYBRID,
    ),
    "GPT-2": ("GPT2", _GPT2),
    "Gemma 3": ("Gemma3", {**_BODY, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "OPT": (
        "OPT",
        {**_BERT, "hidden_size": 24, "word_embed_proj_dim": D, "ffn_dim": 32},
    ),
    "Phi": ("Phi", _PLAIN_HEADS),
    "Cohere": ("Cohere", {**_PLAIN_HEADS, "logit_scale": 0.5}),
}


def build(family: str = "Llama", *, spread: float = 1.0, **changes: Any) -> Any:
    """The tiny model, its table with singular values that differ (as those of trained models do) and a bias that counts."""
    name, settings = FAMILIES[family]
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**settings, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with torch.no_grad():
        growth = 10 ** torch.linspace(0, spread, D)
        embedding.weight.mul_(growth)
        if head.weight is not embedding.weight:
            head.weight.mul_(growth)
        if head.bias is not None:
            head.bias.uniform_(-1, 1)
    return model


def ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, V, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids() if tokens is None else tokens).logits.float()


def difference(left: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest entry of the second."""
    return float((left - right).detach().abs().max() / right.detach().abs().max())


def interface(model: Any) -> FreePIT:
    """Z and T of a converted model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PITEmbedding) and head.weight is embedding.weight
    return FreePIT.share(embedding.weight)


def turned(model: Any) -> Any:
    """With a T that is far from where conversions put it, so that a lost T shows."""
    rows = torch.randn(D, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight.double() @ (rows @ rows.T / D + 0.1 * torch.eye(D)))
    return model


class Repeated(Dataset[dict[str, Tensor]]):
    """The same few sentences again and again."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = ids(4, 12)[index % 4]
        return {"input_ids": row, "labels": row}


def arguments(out: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=4, save_steps=5, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=100, learning_rate=1e-2, weight_decay=0.0, seed=0, dataloader_pin_memory=False,
    )  # fmt: skip


def optimizer_for(model: nn.Module) -> RiemannianAdam:
    return RiemannianAdam(param_groups(model, weight_decay=0.1), lr=1e-2)


_TEXT = {**_BODY, "head_dim": 8}

_IMAGES = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4
}  # fmt: skip

_TWO_STACKS = {
    "vocab_size": V, "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip

BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "BertLMHeadModel": ("BertConfig", {**_BERT, "is_decoder": True}),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "AlbertForMaskedLM": ("AlbertConfig", {**_BERT, "embedding_size": 8}),
}

MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"text_config": _TEXT, "vision_config": _IMAGES, "mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_IMAGES, "model_type": "clip_vision_model"},
            "image_token_id": 90,
            "tie_word_embeddings": True,
        },
    ),
}

SPEECH = {
    **_TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 64, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip

ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "pad_token_id": 0},
    ),
    "BartForConditionalGeneration": ("BartConfig", _TWO_STACKS),
}


def make(kind: str, config: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(10 ** torch.linspace(0, 1, table.shape[1]))
        if (bias := model.get_output_embeddings().bias) is not None:
            bias.uniform_(-1, 1)
    return model


def computed(model: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": ids()})).logits


def round_trip(model: Any, folder: Path, **inputs: Tensor) -> None:
    """Save, load and export of a converted model, whose function stays."""
    before = computed(model, **inputs)
    mt.save(model, folder / "saved")
    loaded: Any = mt.load(folder / "saved")
    kind: Any = model.__class__
    assert loaded.__class__ is kind and torch.equal(computed(loaded, **inputs), before)
    mt.export(model, folder / "exported")
    exported, report = kind.from_pretrained(folder / "exported", output_loading_info=True)
    assert not any(report.values()), report
    assert difference(computed(exported, **inputs), before) <= 1e-5


def stays_as_it_was(model: Any, reason: str, **options: Any) -> None:
    """A conversion that is refused changes nothing: modules, modes, names, config, parameters, the random generator."""
    model.train()
    next(model.children()).eval()
    modules, modes = [(m, type(m)) for m in model.modules()], [module.training for module in model.modules()]
    config, described, names = model.config, model.config.to_dict(), dict(model.all_tied_weights_keys)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parameters = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=reason):
        mt.convert(model, **options)
    assert [(m, type(m)) for m in model.modules()] == modules and [
        module.training for module in model.modules()
    ] == modes
    assert model.config is config and config.to_dict() == described
    assert model.all_tied_weights_keys == names and torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p is parameters[name][0] and p.data_ptr() == parameters[name][1] for name, p in model.named_parameters())
