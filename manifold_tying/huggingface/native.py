"""Make a transformers model natively tied with a pseudo-inverse embedding, and keep it so when transformers builds it again.

A converted model differs from a tied one in the class of its embedding only. config.json marks it: every model that
transformers builds from a marked config gets that class, in ``from_pretrained``, ``from_config`` and constructors alike.
"""

import copy
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from manifold_tying._extra import needs_extra
from manifold_tying.tying import FreePIT, PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OLDEST = 5  # major version of transformers; 4.x has neither `all_tied_weights_keys` nor dicts of tied names
MARK = "manifold_tying"
"""The config's entry {"scale": factor of the embedding's result, "rotated": whether the residual stream was rotated}."""
GUARD = {
    "requires": "manifold-tying[huggingface]",
    "note": "Not quantized. The embedding is W (W^T W)^-1 with W the weight of the head, so a program that looks up rows of W "
    "computes another function. This entry has no quant_method on purpose: transformers stops at it unless "
    "manifold_tying is imported. manifold-tying export writes a checkpoint for other programs.",
}
"""The config's ``quantization_config``: without a method in it, transformers refuses the checkpoint."""


def import_transformers() -> Any:
    """The module transformers; ModuleNotFoundError if it is missing or too old."""
    with needs_extra("huggingface", "Hugging Face models need"):
        transformers = importlib.import_module("transformers")
        if is_too_old(found := transformers.__version__):
            raise ModuleNotFoundError(f"expected transformers >= {_OLDEST}.0, found {found}", name="transformers")
    return transformers


def is_too_old(version: str) -> bool:
    major = version.partition(".")[0]
    return major.isdigit() and int(major) < _OLDEST


def mark(config: "PreTrainedConfig", scale: float, rotated: bool) -> None:
    """Mark a config as a converted model's, and that of its text part, which may be saved alone."""
    for owner in _owners(config):
        owner.manifold_tying = {"scale": scale, "rotated": rotated}
        if not getattr(owner, "quantization_config", None):  # a quantized body keeps its own
            owner.quantization_config = dict(GUARD)
        owner.tie_word_embeddings = True


def is_built_again(model: "PreTrainedModel") -> bool:
    """Whether transformers builds the model from a marked config as it does in ``from_pretrained``; joined models untie it."""
    config = copy.deepcopy(model.config)
    mark(config, 1.0, rotated=False)
    try:
        with torch.device("meta"):
            return is_converted(type(model)(config))
    except Exception:
        return False


def unmarked(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """A copy that describes the stock model with two tables."""
    copied = copy.deepcopy(config)
    for owner in _owners(copied):
        vars(owner).pop(MARK, None)
        if is_guard(getattr(owner, "quantization_config", None)):
            del owner.quantization_config
        owner.tie_word_embeddings = False
    for part in list[Any]([copied, *(getattr(copied, name, None) for name in copied.sub_configs)]):
        if isinstance(dtype := getattr(part, "dtype", None), str):
            part.dtype = getattr(torch, dtype)  # save_pretrained leaves a name, which Apertus passes to torch
    return copied


def _owners(config: Any) -> list[Any]:
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def check_mark(entry: Any, file: object) -> None:
    """Validate the config's entry; ValueError that names the file for a wrong one."""
    known = isinstance(entry, Mapping) and entry.keys() == {"scale", "rotated"} and isinstance(entry["rotated"], bool)
    scale = entry["scale"] if known else None
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale) or scale == 0:
        raise ValueError(
            f'expected {MARK} in {file} to be {{"scale": a finite number other than 0, "rotated": true or false}}, got '
            f"{entry!r:.80}; convert the model again, or install a newer manifold-tying"
        )


def is_guard(entry: Any) -> bool:
    """Whether a ``quantization_config`` is only :data:`GUARD`."""
    return isinstance(entry, Mapping) and "quant_method" not in entry and entry.get("requires") == GUARD["requires"]


def embedding_of(model: nn.Module) -> Any:
    """The model's token embedding, or None."""
    get: Any = getattr(model, "get_input_embeddings", None)
    with suppress(NotImplementedError):  # transformers raises this if there is none
        return None if get is None else get()
    return None


def is_converted(model: nn.Module) -> bool:
    """Whether the model's embedding divides."""
    return isinstance(embedding_of(model), PITEmbedding)


def pit_embedding(model: nn.Module) -> PITEmbedding:
    """The embedding of a converted model; ValueError if the model is not converted, or no longer tied."""
    wrong = f"expected a model converted by manifold_tying.convert, got {type(model).__name__}"
    owner: Any = model
    if not isinstance(embedding := embedding_of(owner), PITEmbedding):
        raise ValueError(f"{wrong} with its own embedding")
    if (head := owner.get_output_embeddings()) is None:
        raise ValueError(f"{wrong} with a head on its vocabulary; save_pretrained keeps a model without one")
    if getattr(head, "weight", None) is not embedding.weight and not embedding.weight.is_meta:  # offloaded: one each
        raise ValueError(f"{wrong} whose head has another weight than its embedding, so W_out E = I does not hold")
    return embedding


def tie(model: "PreTrainedModel") -> None:
    """Share the embedding's weight with the head, and tell transformers so where the model's class does not."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return  # a body, or another head on it
    inside, outside = f"{names[embedding]}.weight", f"{names[head]}.weight"
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    if keys.get(outside, outside) != keys.get(inside, inside):
        own: Any = model._tied_weights_keys or {}
        model._tied_weights_keys = {**own, outside: inside}
        model.all_tied_weights_keys = {**keys, outside: inside}
    model.tie_weights(recompute_mapping=False)


def _post_init(wrapped: Callable[[], None], model: "PreTrainedModel", args: Any, kwargs: Any) -> None:
    """Give a newly built model with a marked config its embedding; parts without an embedding are left as they are."""
    wrapped(*args, **kwargs)
    if (entry := getattr(model.config, MARK, None)) is None:
        return
    check_mark(entry, "config.json")
    if not getattr(model.config, "tie_word_embeddings", False):
        raise ValueError(
            f"config.json has both {MARK} and tie_word_embeddings=false. Set the second to true for a converted model, or "
            f"remove {MARK} and quantization_config for a stock one"
        )
    if isinstance(embedding := embedding_of(model), nn.Embedding):
        PITEmbedding.adopt(embedding, entry["scale"])
        tie(model)


def register() -> None:
    """Teach transformers to build models from marked configs; called once, after its import. Never raises."""
    if is_too_old(getattr(sys.modules["transformers"], "__version__", "")):
        return
    try:
        import wrapt

        modeling, quantizers = sys.modules["transformers.modeling_utils"], sys.modules["transformers.quantizers.auto"]
        wrapt.wrap_function_wrapper(modeling, "PreTrainedModel.post_init", _post_init)
        wrapt.wrap_function_wrapper(modeling, "PreTrainedModel.save_pretrained", _save)
        wrapt.wrap_function_wrapper(modeling, "PreTrainedModel.resize_token_embeddings", _resize)
        wrapt.wrap_function_wrapper(quantizers, "AutoHfQuantizer.supports_quant_method", _supports)
    except Exception:
        logging.getLogger(__name__).warning("Cannot register converted models with transformers.", exc_info=True)


def _save(wrapped: Callable[..., Any], model: "PreTrainedModel", args: Any, kwargs: Any) -> Any:
    """ValueError if the saved config would promise an embedding that the model does not have."""
    if hasattr(model.config, MARK):
        if not is_converted(model):
            raise ValueError(
                f"{type(model).__name__} was converted and then given another embedding, {model.get_input_embeddings()}. "
                f"Remove config.{MARK} and config.quantization_config to save it as a stock model"
            )
        if model.get_output_embeddings() is not None:
            pit_embedding(model)
    return wrapped(*args, **kwargs)


def _supports(wrapped: Callable[..., bool], _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """The guard is no quantization; a user's own quantization_config may then take its place."""
    return False if is_guard(args[0]) else wrapped(*args, **kwargs)


@torch.no_grad()
def _resize(wrapped: Callable[..., nn.Embedding], model: "PreTrainedModel", args: Any, kwargs: Any) -> nn.Embedding:
    """Say by how much a resize moves the embeddings; ValueError if the remaining rows cannot determine E."""
    if not is_converted(model) or model.get_input_embeddings().weight.is_meta:
        return wrapped(*args, **kwargs)
    embedding: Any = model.get_input_embeddings()
    V, d = embedding.weight.shape
    size = args[0] if args else kwargs.get("new_num_tokens")
    if size is not None and size < V:
        if size < d:
            raise ValueError(f"expected at least d = {d} tokens, because W needs full column rank, got {size}")
        FreePIT.share(embedding.weight[:size]).materialize()  # raises without full rank
    sample = torch.arange(0, V, max(1, V // 1024), device=embedding.weight.device)
    before = embedding(sample).double()
    resized = wrapped(*args, **kwargs)
    if (new := len(resized.weight)) != V:
        kept = sample < new
        moved = float((resized(sample[kept]).double() - before[kept]).norm() / before[kept].norm())
        warnings.warn(
            f"vocabulary {V} -> {new}: rows of W were {'appended' if new > V else 'removed'} and the others kept. E = "
            f"W (WᵀW)⁻¹ couples all rows, so the embeddings of the remaining tokens moved by {moved:.1e} of their norm, and "
            "every output with them",
            stacklevel=3,
        )
    return resized
