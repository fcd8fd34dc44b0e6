"""Transpose tying to Pseudo-Inverse Tying, in a transformers model, in place."""

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal
from manifold_tying.tying._pit import PIT, Memory, Transform
from manifold_tying.tying.huggingface._install import install, make_halves, own_config, swap
from manifold_tying.tying.huggingface._modules import PITEmbedding, PITHead
from manifold_tying.tying.huggingface._probe import failure, undisturbed
from manifold_tying.tying.huggingface._rotate import (
    Changes,
    Rotation,
    can_rotate,
    check_rotated,
    even_gain,
    logits_with_gain,
    rotate_body,
    rotation,
    undo,
)
from manifold_tying.tying.huggingface._tables import Source, read_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Start = Literal["identity", "head", "embedding", "rotation"]
M = TypeVar("M", bound="PreTrainedModel")


def convert(
    model: M,
    *,
    transform: Start = "head",
    bridge: bool = False,
    memory: Memory = "free",
    source: Source | None = None,
    retraction: Retraction | None = None,
    diagonal: Diagonal | None = None,
) -> M:
    """Replace the tied tables of a transformers causal language model by a :class:`manifold_tying.PIT` interface, in place.

    The table E0 = U H (polar factors, float64) becomes the memory Z = U and a transform T = L Lᵀ. (PIT, section 4.1.) Around
    them the model stays as it is: multipliers, soft-capping, an embedding's own scale, the head's bias, the padding row.

    Without a bridge this is the start of a training, not an equal model: E0ᵀE0 = H², where PIT has W_out E = I, so no T gives
    the same function unless H² = I. :func:`conversion_losses` says what each choice costs on your data.

    Args:
        model: any transformers model with an embedding and a head. Z and L are float32 (float64 in a float64 model).
        transform: "identity" (T = I, the paper), "head" (T = H: the head computes what it did) or "embedding" (T = H⁻¹: the
            embedding does); or "rotation": "embedding" after a rotation of the residual stream, for Llama-like models, which
            keeps the function as far as the final norm's gain is even.
        bridge: keep the model's function exactly: T = I, and a trainable d x d matrix, H at the start, applied to embeddings
            and to hidden states. It gives up W_out E = I at the level of the model: only Z and T have it then, not the maps
            from tokens to hidden states and back.
        memory: "free", one table that any optimizer trains; or Z and T apart, with Z "frozen" (the paper's form) or
            "trainable" by :mod:`manifold_tying.optim`, through ``param_groups(model)``: an ordinary optimizer leaves the
            manifold.
        retraction: of a trainable memory, see :class:`manifold_tying.PIT`.
        diagonal: of the transform of a frozen or trainable memory, see :class:`manifold_tying.PIT`.
        source: for a model with two different tables, the one to keep, "input" or "output". The other is lost, with a warning.

    Returns:
        the model itself.

    Raises:
        ValueError: untied tables without ``source``; V < d; a table of deficient rank; an embedding or a head that computes
            more than is known here; a model that is converted, quantized or wrapped; one that does not run afterwards, on a
            few random tokens, or whose logits a rotation changes. The model is as it was then.
    """
    tables = read_tables(model, source)
    turned = None
    if transform == "rotation":
        if bridge or tables.untied:
            raise ValueError(
                "expected a tied model and no bridge with transform='rotation', which makes up for both tables"
            )
        turned = rotation(model, tables.weight)
    interface = PIT.from_embedding(  # before anything is changed: it refuses tables and options
        tables.weight if turned is None else turned.table,
        transform="embedding" if transform == "rotation" else transform,
        bridge=bridge,
        memory=memory,
        **{name: given for name, given in (("retraction", retraction), ("diagonal", diagonal)) if given is not None},
    )
    if tables.untied:
        warnings.warn(
            f"{type(model).__name__} had two tables; kept is the one of the {source}, and the model has to be trained again",
            stacklevel=2,
        )
    embedding, head = make_halves(
        interface,
        tables.weight.dtype,
        scale=tables.scale,
        padding_idx=tables.padding_idx,
        bias=tables.bias,
        rotated=turned is not None,
    )
    _try(model, embedding, head, turned)
    own_config(model)
    install(model, embedding, head)
    return model


def _try(model: "PreTrainedModel", embedding: PITEmbedding, head: PITHead, turned: Rotation | None) -> None:
    """Put the halves in, turn the body, and run the model; where that fails, everything is put back and ValueError raised."""
    changes: Changes = []
    with undisturbed(model):
        reference = None if turned is None else logits_with_gain(model, even_gain(turned))
        stock = swap(model, embedding, head)
        try:
            if turned is None or reference is None:
                error = None if _has_meta(model) else failure(model)
            else:
                rotate_body(model, turned, changes)
                check_rotated(model, turned, reference)
                error = None
        except BaseException:
            swap(model, *stock)
            undo(changes)
            raise
        if error is not None:
            swap(model, *stock)
            if failure(model) is None:
                raise ValueError(
                    f"{type(model).__name__} does not run with another embedding and head, as one that reads their weights "
                    f"does not; it cannot be converted and is as it was: {type(error).__name__}: {error}"
                ) from error


def _has_meta(model: "PreTrainedModel") -> bool:
    return any(p.is_meta for p in model.parameters())


@torch.no_grad()
def conversion_losses(
    model: "PreTrainedModel", batch: Mapping[str, Tensor], *, source: Source | None = None
) -> dict[str, float]:
    """Loss of the model on a batch as it is and right after each conversion, in nats per token; the model stays as it is.

    Args:
        model: as for :func:`convert`.
        batch: keyword arguments of the model, ``input_ids`` or ``inputs_embeds`` and what else it takes; ``labels`` are
            ``input_ids`` by default.
        source: as for :func:`convert`.

    Returns:
        {"source": the model's own, "identity", "head", "embedding": without a bridge, "bridge"}, and "rotation" for models that
        it is there for; that one is tried on a copy, which needs the model's memory once more, and not with
        ``inputs_embeds``, which it would have to rotate as well.
    """
    tables = read_tables(model, source)
    if "labels" not in batch and "input_ids" not in batch:
        raise ValueError(
            f"expected labels, or input_ids to take as labels, in the batch; got {', '.join(batch) or 'none'}"
        )
    inputs: dict[str, Any] = {**batch, "labels": batch["labels"] if "labels" in batch else batch["input_ids"]}
    training = model.training
    model.eval()
    try:
        losses = {"source": float(model(**inputs).loss)}
        choices: dict[str, dict[str, Any]] = {name: {"transform": name} for name in get_args(Transform)}
        for choice, options in {**choices, "bridge": {"bridge": True}}.items():
            interface = PIT.from_embedding(tables.weight, **options)
            dtype = tables.weight.dtype
            embedding = PITEmbedding(interface, dtype, scale=tables.scale)
            before = swap(model, embedding, PITHead(interface, dtype, tables.bias))
            try:
                losses[choice] = float(model(**inputs).loss)
            finally:
                swap(model, *before)
        if not tables.untied and "inputs_embeds" not in inputs and can_rotate(model):
            with suppress(ValueError):  # blocks as in Llama, but more than that around them
                losses["rotation"] = float(convert(copy.deepcopy(model), transform="rotation")(**inputs).loss)
    finally:
        model.train(training)
    return losses
