"""Tiny untrained models of each kind that the tests convert, built from their configurations, without a network."""

from typing import Any

import torch
import transformers
from torch import Tensor

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
_PLAIN_HEADS = {**_BODY, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _BODY),
    "SmolLM3": ("SmolLM3", _BODY),
    "Qwen3": ("Qwen3", {**_BODY, "head_dim": 8}),
    "Granite": ("Granite", {**_BODY, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        {
            **_BODY,
            "layer_types": ["attention", "attention"],
            "mamba_n_heads": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
        },
    ),
    "GPT-2": ("GPT2", _GPT2),
    "Gemma 3": ("Gemma3", {**_BODY, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "OPT": (
        "OPT",
        {
            "vocab_size": V,
            "hidden_size": 24,
            "word_embed_proj_dim": D,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
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
