"""Find the tied tables of a stock model by what its modules compute."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from manifold_tying.huggingface.native import embedding_of, import_transformers
from manifold_tying.tying import PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 8
Source = Literal["input", "output"]


@dataclass(frozen=True)
class StockTables:
    """Inputs of a conversion: both modules, the table (V, d) to keep, and the factor of the embedding's result."""

    embedding: nn.Embedding
    head: nn.Module
    weight: nn.Parameter
    scale: float
    untied: bool


def check_model(model: nn.Module) -> None:
    """ValueError unless the model is a transformers model that is not wrapped."""
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise ValueError(
            f"expected a transformers model (PreTrainedModel), got {type(model).__name__}; unwrap a PEFT or compiled model "
            "first: peft_model.merge_and_unload(), where mt.materialize comes before for constrained layers; "
            "compiled._orig_mod. A model of your own takes PIT.from_embedding(weight)"
        )


def check_adapters(model: "PreTrainedModel") -> None:
    """ValueError as :func:`check_model`, or for PEFT layers: ``save_pretrained`` would write them alone, or PEFT's names."""
    check_model(model)
    kinds = {type(module) for module in model.modules()}
    if any(base.__module__.startswith("peft.") for kind in kinds for base in kind.__mro__):
        raise ValueError(
            f"expected a model without adapters, got {type(model).__name__} with PEFT's; merge them first: "
            "peft_model.merge_and_unload(), where mt.materialize comes before for constrained layers. If the adapter was "
            "added by model.add_adapter or load_adapter, save it, reload the base model, attach the adapter with "
            "peft.PeftModel.from_pretrained, and merge it"
        )


def read_tables(model: "PreTrainedModel", source: Source | None = None) -> StockTables:
    """Read the tables of a stock model, tied or with a ``source``; ValueError with the reason if it cannot be converted.

    Ignores module names: runs the embedding on a small table instead.
    """
    if source is not None and source not in get_args(Source):
        raise ValueError(f"unknown source {source!r}; choose {', '.join(get_args(Source))}, or None for a tied model")
    check_model(model)
    kind = type(model).__name__
    embedding = embedding_of(model)
    if isinstance(embedding, PITEmbedding):
        raise ValueError(f"{kind} is already converted; export it first to convert it with other options")
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        raise ValueError(f"expected a token embedding, an nn.Embedding without max_norm, but {kind} has {embedding}")
    if (head := model.get_output_embeddings()) is None:
        raise ValueError(f"expected a causal language model, but {kind} has no head (get_output_embeddings)")
    table, out = _weight(embedding), _weight(head)
    if others := _other_names(model, embedding, head):
        raise ValueError(
            f"expected one embedding and one head, but {kind} also has a token table under {', '.join(others)}, as "
            "encoder-decoder models do; such models cannot be converted"
        )
    if table.shape != out.shape:
        shapes = f"{tuple(table.shape)} and {tuple(out.shape)}"
        raise ValueError(f"expected embedding and head of the same shape (V, d), got {shapes}")
    scale = _scale(embedding)
    untied = out is not table and not torch.equal(out, table)
    if untied and source is None:
        raise ValueError(
            f"{kind} has different tables for embedding and head, but PIT has one memory for both. Choose the table to keep "
            'with source="input" or source="output", and train the model again'
        )
    return StockTables(embedding, head, out if source == "output" else table, scale, untied)


def _other_names(model: "PreTrainedModel", embedding: nn.Module, head: nn.Module) -> list[str]:
    """Names of further modules with the embedding's table, or in an encoder-decoder with another one of its shape."""
    table, two = embedding.weight, getattr(model.config, "is_encoder_decoder", False)

    def is_table(module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        alike = two and isinstance(module, nn.Embedding) and weight is not None and weight.shape == table.shape
        return weight is table or alike

    return [name for name, module in model.named_modules() if module not in (embedding, head) and is_table(module)]


def _weight(module: nn.Module) -> nn.Parameter:
    weight, name = module._parameters.get("weight"), type(module).__name__
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"expected embedding and head with a floating-point parameter weight (V, d), got {name}")
    if weight.is_meta:
        raise ValueError(f"expected the weight of {name} in memory, but it is offloaded or on the meta device; load it")
    if not torch.isfinite(weight).all():
        raise ValueError(f"expected a finite weight of {name}, got NaN or Inf in it")
    return weight


@torch.no_grad()
def _scale(embedding: nn.Embedding) -> float:
    """Factor s of an embedding that computes s · (rows of its weight); usually 1 (Gemma 3: √d)."""
    generator, device = torch.Generator().manual_seed(0), embedding.weight.device
    small = torch.randn(8, embedding.weight.shape[1], generator=generator, dtype=torch.float64).to(device)
    module: Any = embedding
    padding_idx, module.padding_idx = module.padding_idx, None  # may exceed the 8 rows, and does not affect the result
    try:
        out = functional_call(module, {"weight": small}, (torch.arange(8, device=device),))
    finally:
        module.padding_idx = padding_idx
    scale = float((out * small).sum() / small.square().sum()) if isinstance(out, Tensor) else math.nan
    if not isinstance(out, Tensor) or not torch.allclose(out.double(), scale * small, rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"expected an embedding that looks up rows times a constant; {type(embedding).__name__} computes more, which "
            "conversion would lose"
        )
    exact = getattr(embedding, "scalar_embed_scale", scale)  # Gemma 3 rounds this to the model's dtype
    scale = exact if math.isclose(exact, scale, rel_tol=1e-2) else scale
    return 1.0 if abs(scale - 1) < 1e-9 else scale


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; restores every module's mode and torch's global generators on exit."""
    modes = {module: module.training for module in model.modules()}
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(gpus):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def random_ids(model: "PreTrainedModel") -> Tensor:
    """(1, LENGTH) random token ids without padding, on the embedding's device, from a separate generator."""
    embedding: Any = model.get_input_embeddings()
    V, padding = len(embedding.weight), embedding.padding_idx
    ids = torch.randint(V, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    if padding is not None:
        ids[ids == padding] = (padding + 1) % V
    return ids.to(embedding.weight.device)


def is_called(model: "PreTrainedModel", embedding: Any) -> bool:
    """Whether the model looks up tokens by calling its embedding only, on a few random tokens.

    True also for a model that runs neither on ``input_ids`` nor on its ``dummy_inputs``.
    """
    table, calls = embedding.weight, []

    def lookup(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> Tensor:
        calls.append(inputs)
        return F.embedding(*inputs, table)

    with undisturbed(model):
        if not (inputs := next((inputs for inputs in _examples(model) if _is_finite(model, inputs)), None)):
            return True
        hook = embedding.register_forward_hook(lookup)
        embedding._parameters["weight"] = nn.Parameter(table.new_full((1, 1), torch.nan).expand_as(table))
        try:
            return _is_finite(model, inputs) and bool(calls)
        finally:
            embedding._parameters["weight"] = table
            hook.remove()


def _examples(model: "PreTrainedModel") -> Iterator[dict[str, Any]]:
    """Inputs to try; speech models have no ``input_ids``."""
    yield {"input_ids": random_ids(model)}
    with suppress(Exception):  # some classes have none
        inputs = {name: value.to(model.device) for name, value in model.dummy_inputs.items()}
        yield {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _is_finite(model: "PreTrainedModel", inputs: dict[str, Any]) -> bool:
    try:
        found = model(**inputs)
    except Exception:
        return False
    return not any(isinstance(x, Tensor) and x.is_floating_point() and x.isnan().any() for x in found.values())
