"""The embedding and head of a stock transformers model, read through its accessors and checked by what they compute."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manifold_tying._transformers import import_transformers
from manifold_tying.tying.huggingface._modules import PITEmbedding
from manifold_tying.tying.huggingface._probe import independent_of_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Source = Literal["input", "output"]


@dataclass(frozen=True)
class StockTables:
    """What conversion takes from a model: the table (V, d) to decompose, and what its two modules compute around it."""

    weight: Tensor
    scale: float
    padding_idx: int | None
    bias: nn.Parameter | None
    untied: bool


def check_model(model: nn.Module) -> None:
    """ValueError unless model is a transformers model itself, neither wrapped nor quantized."""
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise ValueError(
            f"expected a transformers model (PreTrainedModel), got {type(model).__name__}; of a PEFT or compiled model take "
            "the one it wraps: peft_model.merge_and_unload(), compiled._orig_mod"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"expected a model in floating point, got {type(model).__name__} quantized by "
            f"{getattr(model, 'quantization_method', 'unknown')}; load it without quantization"
        )


def check_adapters(model: "PreTrainedModel") -> None:
    """ValueError for a model with PEFT layers, of which ``save_pretrained`` writes the adapter alone, or names of PEFT's."""
    layers = [
        name
        for name, module in model.named_modules()
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)
    ]
    if layers or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"expected a model without adapters, got {type(model).__name__} with PEFT's ({', '.join(layers[:3]) or 'no layers'}"
            f"{', ...' if len(layers) > 3 else ''}); merge them first: peft_model.merge_and_unload(). Of an adapter that was "
            "added by model.add_adapter or load_adapter, save_pretrained writes the adapter: attach that to the model, loaded "
            "again, by peft.PeftModel.from_pretrained and merge it"
        )


def read_tables(model: "PreTrainedModel", source: Source | None = None) -> StockTables:
    """The tables of a stock model; ValueError with the reason where a conversion could not compute what the model does.

    Nothing goes by module names: what embedding and head do with a table is tried out on a small one.

    Args:
        model: with an embedding and a head, tied unless ``source`` is given.
        source: which of two untied tables to keep.
    """
    if source is not None and source not in get_args(Source):
        raise ValueError(
            f"unknown source {source!r}; choose one of {', '.join(get_args(Source))}, or None for a tied model"
        )
    check_model(model)
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError as error:  # transformers' way to say that there is none
        raise ValueError(
            f"expected a model with a token embedding, but {type(model).__name__} has none: {error}"
        ) from error
    if isinstance(embedding, PITEmbedding):
        raise ValueError(f"{type(model).__name__} is converted already; export it first to convert it in another way")
    if head is None:
        raise ValueError(
            f"expected a causal language model, but {type(model).__name__} has no head (get_output_embeddings)"
        )
    table, out = _weight(embedding, "embedding"), _weight(head, "head")
    if others := _other_names(model, embedding, head):
        raise ValueError(
            f"expected one embedding and one head, but {type(model).__name__} has the table, or another like it, under "
            f"{', '.join(others)} as well, as encoder-decoder models do; those cannot be converted"
        )
    if table.shape != out.shape:
        raise ValueError(
            f"expected embedding and head of one shape (V, d), got {tuple(table.shape)} and {tuple(out.shape)}"
        )
    scale = _scale(embedding)
    bias = _bias(head)
    untied = out is not table and not torch.equal(out, table)
    if untied and source is None:
        raise ValueError(
            f"{type(model).__name__} has different tables for embedding and head, and PIT has one memory for both: no "
            'transform replaces the other. Say which to keep, source="input" or source="output", and train the model again'
        )
    padding_idx = getattr(embedding, "padding_idx", None)
    return StockTables(out if source == "output" else table, scale, padding_idx, bias, untied)


def _other_names(model: "PreTrainedModel", embedding: nn.Module, head: nn.Module) -> list[str]:
    """Names of modules with the embedding's table, or another table of tokens, beside the embedding's first and the head's."""
    table, found, alike, seen = embedding._parameters["weight"], [], {}, set()
    assert table is not None
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if module not in (embedding, head) or module in seen:
            if weight is table:
                found.append(name)
            elif isinstance(module, nn.Embedding) and weight is not None and weight.shape == table.shape:
                alike[name] = module
        seen.add(module)
    if alike and not getattr(model.config, "is_encoder_decoder", False):
        positions = independent_of_tokens(model, list(alike.values()))  # GPT-2 with as many positions as tokens
        alike = {name: module for name, module in alike.items() if module not in positions}
    return [*found, *alike]


def _weight(module: nn.Module, side: str) -> Tensor:
    weight = module._parameters.get("weight")
    kind = type(module).__name__
    if weight is None or weight.ndim != 2:
        raise ValueError(f"expected the {side} to have a parameter weight (V, d) of its own, got {kind}")
    if weight.is_meta:
        raise ValueError(
            f"expected the {side}'s weight to be in memory, but it is offloaded or on the meta device; load it"
        )
    if not torch.isfinite(weight).all():
        raise ValueError(f"expected the {side}'s weight to be finite, got NaN or Inf in it")
    return weight


@torch.no_grad()
def _scale(embedding: nn.Module) -> float:
    """s of an embedding that computes s · (rows of its weight), 1 for all but a few (Gemma 3: √d)."""
    weight = embedding._parameters["weight"]
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(8, weight.shape[1], generator=generator, dtype=torch.float64).to(weight.device)
    module: Any = embedding
    padding_idx = getattr(module, "padding_idx", None)
    module.padding_idx = None  # it need not be among those rows, and says nothing of what is computed
    try:
        out = _tried(module, {"weight": small}, torch.arange(8, device=weight.device))
    finally:
        module.padding_idx = padding_idx
    scale = float((out * small).sum() / small.square().sum())
    if not torch.allclose(out.double(), scale * small, rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"expected an embedding that looks rows up, with a constant factor at most; {type(embedding).__name__} does more, "
            "and that would be lost"
        )
    exact = getattr(embedding, "scalar_embed_scale", scale)  # Gemma 3 computes with this, rounded to the model's dtype
    scale = exact if math.isclose(exact, scale, rel_tol=1e-2) else scale
    return 1.0 if abs(scale - 1) < 1e-9 else scale


@torch.no_grad()
def _bias(head: nn.Module) -> nn.Parameter | None:
    """The bias of a head that computes h weightᵀ + bias; ValueError for one that does anything else."""
    weight, bias = head._parameters["weight"], head._parameters.get("bias")
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(8, weight.shape[1], generator=generator, dtype=torch.float64).to(weight.device)
    parts = {"weight": small, **({} if bias is None else {"bias": small[:, 0].clone()})}
    out = _tried(head, parts, small)
    expected = small @ small.T + (0 if bias is None else small[:, 0])
    if out.shape != expected.shape or not torch.allclose(out.double(), expected, rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"expected a head that computes h Wᵀ + bias; {type(head).__name__} does more, and that would be lost"
        )
    return bias


def _tried(module: nn.Module, parts: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the module computes of x with other parameters; ValueError where that is no tensor (I-BERT's embedding)."""
    try:
        out = functional_call(module, parts, (x,))
    except Exception as error:
        raise ValueError(f"cannot try out what {type(module).__name__} computes: {error}") from error
    if not isinstance(out, Tensor):
        raise ValueError(
            f"expected an embedding and a head that return one tensor; {type(module).__name__} returns {type(out).__name__}"
        )
    return out
