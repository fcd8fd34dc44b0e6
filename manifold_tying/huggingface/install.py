"""Put an interface into a model, record it in the config, and follow resizes."""

import copy
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import linalg, precision
from manifold_tying.huggingface.folder import FORMAT, METHOD, REQUIRES
from manifold_tying.huggingface.modules import PITEmbedding, PITHead
from manifold_tying.parametrizations import CholeskyFactor, OnStiefel, parametrized
from manifold_tying.tying import PIT, FreePIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
            raise ValueError(f"{type(model).__name__} ignores a new embedding and head; it cannot be converted")
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


def rename(model: "PreTrainedModel", name: str) -> None:
    """Set the name by which PEFT and TRL load the model again."""
    model.name_or_path = model.config.name_or_path = name


def record(model: "PreTrainedModel") -> None:
    """Tell transformers which names share a tensor, what stays float32, and what to write to config.json."""
    embedding, _ = halves(model)
    entry = {"quant_method": METHOD, "format": FORMAT, **options(embedding)}
    inside, outside = half_names(model)
    shared = {f"{outside}.interface.{n}": f"{inside}.interface.{n}" for n, _ in embedding.interface.named_parameters()}
    # Keep the head's bias, which BERT ties too.
    replaced = (f"{inside}.weight", f"{outside}.weight", f"{outside}.interface.")
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
    own = {"resize_token_embeddings": resize_token_embeddings, "get_input_embeddings": get_input_embeddings}
    # Not bound methods: pickle would look them up in the class.
    vars(model).update({name: partial(method, model) for name, method in own.items()})


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


def half_names(model: nn.Module) -> tuple[str, str]:
    """Module names of the converted embedding and head."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = halves(model)
    return names[embedding], names[head]


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


def get_input_embeddings(model: "PreTrainedModel") -> nn.Module:
    """``get_input_embeddings`` of a converted model; ValueError once PEFT has wrapped the embedding to train single tokens."""
    embedding: Any = type(model).get_input_embeddings(model)
    if hasattr(embedding, "token_adapter"):
        raise embedding.token_adapter.base_layer.untying("training single tokens")
    return embedding


def resize_token_embeddings(
    model: "PreTrainedModel",
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> "PITEmbedding":
    """``resize_token_embeddings`` of a converted model: truncate or extend Z to Y, then Z' = Y (YᵀY)^(-1/2).

    T (and a bridge) do not change, so every embedding and logit moves by the deviation of YᵀY from I. A free table keeps its
    rows and the logits; T = (WᵀW)^(1/2) and all embeddings change. A warning reports by how much. This is unavoidable,
    because W_out E = I couples all rows. The head's bias is truncated or padded with zeros.

    Args:
        model: a model converted by :func:`manifold_tying.convert`; changed in place.
        new_num_tokens: the new V; None keeps the current one.
        pad_to_multiple_of: round V up to a multiple of this.
        mean_resizing: if True, each new row is the mean row of Z or W (all new rows are equal, so train them); if False,
            Gaussian with the mean square of the old rows.

    Returns:
        The new embedding.
    """
    embedding, head = halves(model)
    old = embedding.interface
    V = old.vocab_size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        V = -(-V // pad_to_multiple_of) * pad_to_multiple_of
    if V == old.vocab_size:
        return embedding
    if V < old.hidden_size:
        raise ValueError(f"expected at least d = {old.hidden_size} tokens, because ZᵀZ = I needs V >= d; got {V}")
    new = _resized(old, V, interface_options(old), mean_resizing, embedding.weight.dtype)
    bias = None
    if head.bias is not None:
        padded = nn.functional.pad(head.bias.detach(), (0, V - old.vocab_size))
        bias = nn.Parameter(padded, requires_grad=head.bias.requires_grad)
    padding_idx = embedding.padding_idx if embedding.padding_idx is not None and embedding.padding_idx < V else None
    dtype, scale, rotated = embedding.weight.dtype, embedding.scale, embedding.rotated
    resized = PITEmbedding(new, dtype, scale=scale, padding_idx=padding_idx, rotated=rotated)
    resized.saved_with_adapters = embedding.saved_with_adapters
    install(model, resized, PITHead(new, dtype, bias))
    for module in model.modules() if bias is not None else ():
        for name, parameter in module._parameters.items():
            if parameter is head.bias:  # RoBERTa registers it twice
                module._parameters[name] = bias
    model.config.get_text_config().vocab_size = V
    model.vocab_size = V
    unchanged = "Logits" if isinstance(new, FreePIT) else "T"
    warnings.warn(
        f"vocabulary {old.vocab_size} -> {V}: rows were {'appended' if V > old.vocab_size else 'removed'}. W_out E = I couples "
        f"all rows, so the embeddings of the remaining tokens moved by {_moved(old, new):.1e} of their norm. {unchanged} and "
        "the body did not change",
        stacklevel=2,
    )
    return resized


@torch.no_grad()
def _resized(old: PIT, V: int, options: dict, mean_resizing: bool, dtype: torch.dtype) -> PIT:
    Z = old._table().double()
    if V < old.vocab_size:
        Y = Z[:V]
        squares = torch.linalg.eigvalsh(precision.gram(Y))
        smallest = (squares[0].clamp_min(0) / squares[-1]).sqrt()
        if not smallest > 1e-5:
            raise ValueError(
                f"cannot truncate the vocabulary to {V}: the remaining rows do not span the hidden space (smallest / largest "
                f"singular value {smallest:.0e}), so ZᵀZ = I is impossible; keep more tokens"
            )
    else:
        rows = Z.mean(0).expand(V - old.vocab_size, -1)
        Y = torch.cat([Z, rows if mean_resizing else torch.randn_like(rows) * Z.square().mean().sqrt()])
    new = PIT(V, old.hidden_size, **options).to(Z.device, old._table().dtype)
    if isinstance(new, FreePIT):
        new.table.copy_(Y).requires_grad_(old._table().requires_grad)
    else:
        new.memory = linalg.polar(Y)[0].to(old.memory.dtype)
        new.cholesky_factor = old.cholesky_factor
        factors = [parametrized(pit)["cholesky_factor"].original for pit in (old, new)]
        factors[1].requires_grad_(factors[0].requires_grad)
    if old.bridge is not None:
        new.bridge = old.bridge
    return new.to(dtype)


@torch.no_grad()
def _moved(old: PIT, new: PIT) -> float:
    n = min(old.vocab_size, new.vocab_size)
    ids = torch.arange(n, device=old._table().device)
    before: Tensor = old.embed(ids).double()
    return float((new.embed(ids) - before).norm() / before.norm())
