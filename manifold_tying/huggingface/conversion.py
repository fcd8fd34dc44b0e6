"""Convert a transformers model from transpose tying to Pseudo-Inverse Tying, in place."""

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from manifold_tying.huggingface.install import install, own_config, rename, swap
from manifold_tying.huggingface.modules import PITEmbedding, PITHead
from manifold_tying.huggingface.rotation import (
    Rotation,
    check_plain,
    check_rotated,
    even_gain,
    logits_with_gain,
    rotate_body,
    rotation,
)
from manifold_tying.huggingface.tables import Source, failure, read_tables, undisturbed
from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal
from manifold_tying.tying import PIT, Memory, Transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Start = Literal["identity", "head", "embedding", "rotation"]
M = TypeVar("M", bound="PreTrainedModel")
UNSAVED = "converted by manifold_tying and not saved: call manifold_tying.save first"  # no path and no name on the hub


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
    """Replace the tied tables of a transformers causal language model with a :class:`manifold_tying.PIT` interface, in place.

    The table E0 = U H (polar factors, float64) becomes the memory Z = U and a transform T = L Lᵀ (PIT, section 4.1). The rest
    of the model does not change: multipliers, soft-capping, the embedding's own scale, the head's bias, the padding row.

    Without a bridge the converted model must be trained; it computes another function. E0ᵀE0 = H² while PIT has W_out E = I,
    so no T preserves the function unless H² = I. :func:`conversion_losses` measures the cost of each choice on your data.

    Args:
        model: any transformers model with an embedding and a head. Z and L are float32 (float64 in a float64 model).
        transform: "identity" (T = I, the paper), "head" (T = H: preserves the head) or "embedding" (T = H⁻¹: preserves the
            embedding). "rotation" rotates the residual stream of a Llama-like model, then applies "embedding". It preserves
            the function up to the spread of the final norm's gain.
        bridge: preserve the model's function exactly: T = I, and a trainable d x d matrix, initially H, is applied to
            embeddings and to hidden states. Z and T still satisfy W_out E = I, but the maps from tokens to hidden states and
            back do not.
        memory: "free", one table that any optimizer trains; or separate Z and T, with Z "frozen" (as in the paper) or
            "trainable" by :mod:`manifold_tying.optim` with ``param_groups(model)``. Other optimizers leave the manifold.
        retraction: retraction of a trainable memory, see :class:`manifold_tying.PIT`.
        diagonal: diagonal map of T with a frozen or trainable memory, see :class:`manifold_tying.PIT`.
        source: which of two different tables to keep, "input" or "output". The other is discarded with a warning.

    Returns:
        ``model``.

    Raises:
        ValueError: untied tables without ``source``; V < d; a rank-deficient table; an embedding or head that computes more
            than a lookup or a linear map; a converted, quantized or wrapped model. Also if the converted model does not run
            on a few random tokens, or a rotation changes its logits. The model is then unchanged.
    """
    tables = read_tables(model, source)
    turned = None
    if transform == "rotation":
        if bridge or tables.untied:
            raise ValueError("transform='rotation' needs a tied model without a bridge; choose another transform")
        turned = rotation(model, tables.weight)
    interface = PIT.from_embedding(  # before any change, because it validates the table and options
        tables.weight if turned is None else turned.table,
        transform="embedding" if transform == "rotation" else transform,
        bridge=bridge,
        memory=memory,
        **{name: given for name, given in (("retraction", retraction), ("diagonal", diagonal)) if given is not None},
    )
    if tables.untied:
        warnings.warn(
            f"{type(model).__name__} had two tables; kept the {source} table. Train the model again",
            stacklevel=2,
        )
    dtype, padding_idx = tables.weight.dtype, tables.padding_idx
    embedding = PITEmbedding(interface, dtype, scale=tables.scale, padding_idx=padding_idx, rotated=turned is not None)
    head = PITHead(interface, dtype, tables.bias)
    _try(model, embedding, head, turned)
    own_config(model)
    install(model, embedding, head)
    if model.name_or_path:  # the stock checkpoint: PEFT and TRL would load that one
        rename(model, UNSAVED)
    return model


def _try(model: "PreTrainedModel", embedding: PITEmbedding, head: PITHead, turned: Rotation | None) -> None:
    """Install both halves, rotate the body and run the model. On failure restore everything and raise ValueError."""
    changes: list[tuple[nn.Parameter, Tensor]] = []
    error = None
    with undisturbed(model):
        reference = None if turned is None else logits_with_gain(model, even_gain(turned))
        stock = swap(model, embedding, head)
        try:
            if turned is not None and reference is not None:
                rotate_body(model, turned, changes)
                check_rotated(model, turned, reference)
            elif not any(p.is_meta for p in model.parameters()):
                error = failure(model)
        except BaseException:
            swap(model, *stock)
            for parameter, data in reversed(changes):
                parameter.data = data
            raise
        if error is not None:
            swap(model, *stock)
            if failure(model) is None:
                raise ValueError(
                    f"{type(model).__name__} does not run with another embedding and head; it may read their weights directly. "
                    f"It cannot be converted and is unchanged: {type(error).__name__}: {error}"
                ) from error


def conversion_losses(
    model: "PreTrainedModel", batch: Mapping[str, Tensor], *, source: Source | None = None
) -> dict[str, float]:
    """Loss of the model on a batch before and right after each conversion, in nats per token. The model is not changed.

    Args:
        model: as for :func:`convert`.
        batch: keyword arguments of the model: ``input_ids`` or ``inputs_embeds`` and any others; ``labels`` default to
            ``input_ids``.
        source: as for :func:`convert`.

    Returns:
        Losses under "source" (unconverted), "identity", "head", "embedding" (without a bridge) and "bridge". Models that can
        be rotated also get "rotation", unless the batch has ``inputs_embeds``, which would have to be rotated as well.
        "rotation" is measured on a copy, so the model is in memory twice.
    """
    tables = read_tables(model, source)
    if not isinstance(batch, Mapping):
        raise ValueError(f"expected a mapping such as {{'input_ids': ids}}, got a {type(batch).__name__}")
    if "labels" not in batch and "input_ids" not in batch:
        raise ValueError(f"expected labels or input_ids in the batch, got {', '.join(batch) or 'none'}; add labels")
    inputs: dict[str, Any] = {**batch, "labels": batch["labels"] if "labels" in batch else batch["input_ids"]}
    with undisturbed(model):
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
        if not tables.untied and "inputs_embeds" not in inputs:
            with suppress(ValueError):  # not Llama-like
                check_plain(model)  # before the copy
                losses["rotation"] = float(convert(copy.deepcopy(model), transform="rotation")(**inputs).loss)
    return losses
