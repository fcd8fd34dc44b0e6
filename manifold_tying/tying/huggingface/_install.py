"""Install a PIT interface in a transformers model: its modules, tied names and config entry."""

import copy
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from manifold_tying.parametrizations import CholeskyFactor, OnStiefel
from manifold_tying.parametrizations._register import parametrized
from manifold_tying.tying._free_pit import FreePIT
from manifold_tying.tying._pit import PIT
from manifold_tying.tying.huggingface._entry import FORMAT, METHOD, REQUIRES
from manifold_tying.tying.huggingface._modules import PITEmbedding, PITHead
from manifold_tying.tying.huggingface._resize import resize_token_embeddings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_halves(
    interface: PIT,
    dtype: torch.dtype,
    *,
    scale: float,
    padding_idx: int | None,
    bias: nn.Parameter | None,
    rotated: bool = False,
) -> tuple[PITEmbedding, PITHead]:
    """Build an embedding and a head that share ``interface``, in the model's dtype."""
    embedding = PITEmbedding(interface, dtype, scale=scale, padding_idx=padding_idx, rotated=rotated)
    return embedding, PITHead(interface, dtype, bias)


def install(model: "PreTrainedModel", embedding: PITEmbedding, head: PITHead) -> None:
    """Install the embedding and head; if the model rejects them, it is unchanged."""
    swap(model, embedding.train(model.training), head.train(model.training))
    record(model)


def swap(model: "PreTrainedModel", embedding: nn.Module, head: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Set both modules through the model's accessors, or neither, and return the previous ones."""
    before = model.get_input_embeddings(), model.get_output_embeddings()
    try:
        model.set_input_embeddings(embedding)
        model.set_output_embeddings(head)
        if model.get_input_embeddings() is not embedding or model.get_output_embeddings() is not head:
            raise ValueError(
                f"{type(model).__name__} ignores the embedding and head that are set; it cannot be converted"
            )
    except BaseException as error:
        with suppress(NotImplementedError):
            model.set_input_embeddings(before[0])
            model.set_output_embeddings(before[1])
        if isinstance(error, NotImplementedError):
            raise ValueError(
                f"{type(model).__name__} does not allow setting its embedding and head, so it cannot be converted: {error}"
            ) from error
        raise
    return before


def own_config(model: "PreTrainedModel") -> None:
    """Give the model and its submodules their own copy of the config; models built from one config object share it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if (own := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


def record(model: "PreTrainedModel") -> None:
    """Tell transformers which names share a tensor, what stays float32, and what to write to config.json."""
    embedding, head = halves(model)
    entry = {"quant_method": METHOD, "format": FORMAT, **options(embedding)}
    names = {id(module): name for name, module in model.named_modules()}
    inside, outside = names[id(embedding)], names[id(head)]
    shared = {f"{outside}.interface.{n}": f"{inside}.interface.{n}" for n, _ in embedding.interface.named_parameters()}
    replaced = (
        f"{inside}.weight",
        f"{outside}.weight",
        f"{outside}.interface.",
    )  # keeps the head's bias, which BERT ties too
    others = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if not target.startswith(replaced) and not source.startswith(replaced)
    }
    # Set full names on the instance: transformers expands names that do not end in "weight" only if the tensors exist.
    # The interface stays float32 under dtype=torch.bfloat16. transformers 5.23 also reads this from the empty modules.
    model._tied_weights_keys = {**others, **shared}
    model.all_tied_weights_keys = {**others, **shared}
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), f"{inside}.interface"}
    model.config.tie_word_embeddings = True
    model.config.quantization_config = entry
    model.config.requires = REQUIRES
    # A device map must not split a half: the interface and its caller would be on two devices.
    model._no_split_modules = {*(model._no_split_modules or ()), PITEmbedding.__name__, PITHead.__name__}
    setattr(model, "resize_token_embeddings", MethodType(resize_token_embeddings, model))  # noqa: B010 - mypy: a method


def halves(model: nn.Module) -> tuple[PITEmbedding, PITHead]:
    """The converted embedding and head of a model; ValueError if it is not converted or they are no longer tied."""
    get_input, get_output = getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None)
    embedding, head = get_input and get_input(), get_output and get_output()
    if not isinstance(embedding, PITEmbedding) or not isinstance(head, PITHead):
        raise ValueError(
            f"expected a model converted by manifold_tying.convert, got {type(model).__name__} with its own tables"
        )
    if embedding.interface is not head.interface:
        raise ValueError("embedding and head are untied: they hold two interfaces. Convert the original model again")
    return embedding, head


def options(embedding: PITEmbedding) -> dict[str, Any]:
    """Options in config.json that rebuild the modules without their tensors; ValueError for a materialized interface."""
    return {
        **interface_options(embedding.interface),
        "bridge": embedding.interface.bridge is not None,
        "scale": embedding.scale,
        "padding_idx": embedding.padding_idx,
        "rotated": embedding.rotated,
    }


def interface_options(interface: PIT) -> dict[str, Any]:
    """Arguments of :class:`manifold_tying.PIT` that rebuild an interface without its tensors."""
    if isinstance(interface, FreePIT):
        return {"memory": "free"}
    if not all(parametrize.is_parametrized(interface, name) for name in ("memory", "cholesky_factor")):
        raise ValueError(
            "expected a constrained memory and Cholesky factor, but the interface's constraints were removed, as by "
            "materialize(model). Export the model, or load it again and materialize only its other layers"
        )
    memory = parametrized(interface)["memory"]
    point, factor = memory[0], parametrized(interface)["cholesky_factor"][0]
    assert isinstance(point, OnStiefel) and isinstance(factor, CholeskyFactor)
    return {
        "memory": "trainable" if memory.original.requires_grad else "frozen",
        "retraction": point.manifold.retraction,
        "diagonal": factor.diagonal,
        "bounds": factor.bounds and list(factor.bounds),
    }
