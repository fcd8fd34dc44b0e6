"""Find the tied tables of a stock model by what its modules compute."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from manifold_tying.huggingface._import import import_transformers
from manifold_tying.tying import PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 8


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


def random_ids(model: "PreTrainedModel", seed: int = 0) -> Tensor:
    """(1, LENGTH) random token ids without padding, on the embedding's device, from a separate generator."""
    embedding: Any = model.get_input_embeddings()
    V, padding = len(embedding.weight), getattr(embedding, "padding_idx", None)
    ids = torch.randint(V, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    if padding is not None:
        ids[ids == padding] = (padding + 1) % V
    return ids.to(embedding.weight.device)


def reads_table(model: "PreTrainedModel", embedding: nn.Embedding) -> bool:
    """Whether the model itself reads the weight of its embedding, apart from calling it, on a few random tokens.

    False also for a model that runs neither on ``input_ids`` nor on its ``dummy_inputs``.
    """
    module: Any = embedding
    before, table = vars(module).get("forward"), module.weight
    with undisturbed(model):
        if not (made := next((inputs for inputs in _examples(model) if _is_finite(model, inputs)), None)):
            return False
        module.forward = lambda ids: F.embedding(ids, table)
        module._parameters["weight"] = nn.Parameter(table.new_full((1, 1), torch.nan).expand_as(table))
        try:
            return not _is_finite(model, made)
        finally:
            module._parameters["weight"] = table
            del module.forward
            if before is not None:
                module.forward = before


def _examples(model: "PreTrainedModel") -> Iterator[dict[str, Any]]:
    """Inputs to try; speech models have no ``input_ids``."""
    yield {"input_ids": random_ids(model)}
    inputs = {name: value.to(model.device) for name, value in model.dummy_inputs.items()}
    yield {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _is_finite(model: "PreTrainedModel", inputs: dict[str, Any]) -> bool:
    """Whether the model runs on these inputs and no floating-point output has NaN."""
    try:
        found = model(**inputs)
    except Exception:
        return False
    return not any(isinstance(x, Tensor) and x.is_floating_point() and x.isnan().any() for x in found.values())


def independent_of_tokens(model: "PreTrainedModel", modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules with equal inputs for different tokens, such as position tables; empty if the model does not run."""
    inputs: dict[nn.Module, list[list[Tensor]]] = {module: [] for module in modules}

    def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
        inputs[module][-1].extend(x for x in given if isinstance(x, Tensor))

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        with undisturbed(model):
            for seed in (0, 1):
                for calls in inputs.values():
                    calls.append([])
                model(input_ids=random_ids(model, seed))
    except Exception:
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return [
        module
        for module, (first, second) in inputs.items()
        if first and len(first) == len(second) and all(map(torch.equal, first, second))
    ]


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
    """ValueError unless the model is a transformers model that is not wrapped or quantized."""
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise ValueError(
            f"expected a transformers model (PreTrainedModel), got {type(model).__name__}; unwrap a PEFT or compiled model "
            "first: peft_model.merge_and_unload(), where mt.materialize comes before for constrained layers; "
            "compiled._orig_mod. A model of your own takes PIT.from_embedding(weight)"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"expected a floating-point model, got {type(model).__name__} quantized by "
            f"{getattr(model, 'quantization_method', 'unknown')}; load it without quantization"
        )


def check_adapters(model: "PreTrainedModel") -> None:
    """ValueError for a model with PEFT layers: ``save_pretrained`` would write only the adapter, or PEFT's names."""
    layers = [
        name
        for name, module in model.named_modules()
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)
    ]
    if layers or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"expected a model without adapters, got {type(model).__name__} with PEFT's ({', '.join(layers[:3]) or 'no layers'}"
            f"{', ...' if len(layers) > 3 else ''}); merge them first: peft_model.merge_and_unload(), where mt.materialize "
            "comes before for constrained layers. If the adapter was added by model.add_adapter or load_adapter, save it, "
            "reload the base model, attach the adapter with peft.PeftModel.from_pretrained, and merge it"
        )


def read_tables(model: "PreTrainedModel", source: Source | None = None) -> StockTables:
    """Read the tables of a stock model; ValueError with the reason if it cannot be converted.

    Ignores module names: runs the embedding and head on a small table instead.

    Args:
        model: a model with an embedding and a head, tied unless ``source`` is given.
        source: which of two untied tables to keep.
    """
    if source is not None and source not in get_args(Source):
        raise ValueError(
            f"unknown source {source!r}; choose one of {', '.join(get_args(Source))}, or None for a tied model"
        )
    check_model(model)
    kind = type(model).__name__
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError as error:  # transformers raises this if there is none
        raise ValueError(f"expected a model with a token embedding, but {kind} has none: {error}") from error
    if isinstance(embedding, PITEmbedding):
        raise ValueError(f"{kind} is already converted; export it first to convert it with other options")
    if head is None:
        raise ValueError(f"expected a causal language model, but {kind} has no head (get_output_embeddings)")
    table, out = _weight(embedding, "embedding"), _weight(head, "head")
    if others := _other_names(model, embedding, head, table):
        raise ValueError(
            f"expected one embedding and one head, but {kind} also has a token table under {', '.join(others)}, as "
            "encoder-decoder models do; such models cannot be converted"
        )
    if table.shape != out.shape:
        shapes = f"{tuple(table.shape)} and {tuple(out.shape)}"
        raise ValueError(f"expected embedding and head of the same shape (V, d), got {shapes}")
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        raise ValueError(f"expected an nn.Embedding without max_norm, got {embedding}")
    scale = _scale(embedding, table)
    _check_head(head, out)
    untied = out is not table and not torch.equal(out, table)
    if untied and source is None:
        raise ValueError(
            f"{kind} has different tables for embedding and head, but PIT has one memory for both. Choose the table to keep "
            'with source="input" or source="output", and train the model again'
        )
    return StockTables(embedding, head, out if source == "output" else table, scale, untied)


def _other_names(model: "PreTrainedModel", embedding: nn.Module, head: nn.Module, table: Tensor) -> list[str]:
    """Names, other than the embedding's first and the head's, of modules with the embedding's or another token table."""
    found, alike, seen = [], {}, set()
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if module not in (embedding, head) or module in seen:
            if weight is table:
                found.append(name)
            elif isinstance(module, nn.Embedding) and weight is not None and weight.shape == table.shape:
                alike[name] = module
        seen.add(module)
    if alike and not getattr(model.config, "is_encoder_decoder", False):
        positions = independent_of_tokens(model, list(alike.values()))  # such as GPT-2's, if it has V positions
        alike = {name: module for name, module in alike.items() if module not in positions}
    return [*found, *alike]


def _weight(module: nn.Module, side: str) -> nn.Parameter:
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        raise ValueError(f"expected the {side} to own a parameter weight (V, d), got {type(module).__name__}")
    if weight.is_meta:
        raise ValueError(f"expected the {side}'s weight in memory, but it is offloaded or on the meta device; load it")
    if not torch.isfinite(weight).all():
        raise ValueError(f"expected a finite {side} weight, got NaN or Inf in it")
    return weight


@torch.no_grad()
def _scale(embedding: nn.Module, table: Tensor) -> float:
    """Factor s of an embedding that computes s · (rows of its weight); usually 1 (Gemma 3: √d)."""
    small = _small_table(table)
    module: Any = embedding
    padding_idx = getattr(module, "padding_idx", None)
    module.padding_idx = None  # it may exceed the 8 rows, and does not affect the result
    try:
        out = _tried(module, {"weight": small}, torch.arange(8, device=table.device))
    finally:
        module.padding_idx = padding_idx
    scale = float((out * small).sum() / small.square().sum())
    if not torch.allclose(out.double(), scale * small, rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"expected an embedding that looks up rows times a constant; {type(embedding).__name__} computes more, which "
            "conversion would lose"
        )
    exact = getattr(embedding, "scalar_embed_scale", scale)  # Gemma 3 rounds this to the model's dtype
    scale = exact if math.isclose(exact, scale, rel_tol=1e-2) else scale
    return 1.0 if abs(scale - 1) < 1e-9 else scale


@torch.no_grad()
def _check_head(head: nn.Module, table: Tensor) -> None:
    """ValueError unless the head computes h weightᵀ + bias."""
    small, bias = _small_table(table), head._parameters.get("bias")
    parts = {"weight": small, **({} if bias is None else {"bias": small[:, 0].clone()})}
    out = _tried(head, parts, small)
    expected = small @ small.T + (0 if bias is None else small[:, 0])
    if out.shape != expected.shape or not torch.allclose(out.double(), expected, rtol=1e-9, atol=1e-9):
        raise ValueError(
            f"expected a head that computes h Wᵀ + bias; {type(head).__name__} computes more, which conversion would lose"
        )


def _small_table(table: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, table.shape[1], generator=generator, dtype=torch.float64).to(table.device)


def _tried(module: nn.Module, parts: dict[str, Tensor], x: Tensor) -> Tensor:
    """Output of the module on x with the given parameters; ValueError if it is not a tensor (I-BERT's embedding)."""
    try:
        out = functional_call(module, parts, (x,))
    except Exception as error:
        raise ValueError(f"cannot run {type(module).__name__} on a small table: {error}") from error
    if not isinstance(out, Tensor):
        raise ValueError(
            f"expected an embedding and a head that return one tensor; {type(module).__name__} returns {type(out).__name__}"
        )
    return out
