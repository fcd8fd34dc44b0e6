"""Convert a transformers model from transpose tying to Pseudo-Inverse Tying, in place."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from manifold_tying import precision
from manifold_tying.huggingface.native import is_built_again, mark, tie
from manifold_tying.huggingface.rotation import check_plain, rotate, rotation
from manifold_tying.huggingface.tables import Source, StockTables, is_called, read_tables, undisturbed
from manifold_tying.tying import PIT, FreePIT, PITEmbedding, Transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Start = Literal["identity", "head", "embedding", "rotation"]
M = TypeVar("M", bound="PreTrainedModel")
UNSAVED = "converted by manifold_tying and not saved: call manifold_tying.save first"  # no path and no name on the hub

_REMOVED = {
    "memory": "the model gets one free table W = Z T. To freeze Z, or to train it apart from T, run manifold-tying train or "
    "ablate with --init-from and the interface pit-frozen or pit-trainable",
    "bridge": "to keep the function, use transform='rotation' (Llama-like models), which keeps W_out E = I, too",
}


def convert(model: M, *, transform: Start = "head", source: Source | None = None, **removed: object) -> M:
    """Turn a tied transformers language model into a PIT model in place: only the class of its embedding changes.

    The model keeps its head and stays tied. One parameter W (V, d) is the weight of both: W_out = Wᵀ as before, and the
    embedding becomes a :class:`manifold_tying.tying.PITEmbedding`, which returns rows of E = W (WᵀW)⁻¹. The rest does not
    change: multipliers, soft-capping, the embedding's own scale, the head's bias, the padding row.

    The converted model must be trained; it computes another function. The tied table is E0 = U H (polar factors, float64), and
    E0ᵀE0 = H² while PIT has W_out E = I, so no W = U T preserves the function unless H² = I. :func:`conversion_losses`
    measures the cost of each choice on your data.

    Args:
        model: any transformers model with an embedding and a head.
        transform: "head" (T = H: W is the table, the head is unchanged), "identity" (T = I, the paper) or "embedding"
            (T = H⁻¹: the embedding is unchanged). "rotation" rotates the residual stream of a Llama-like model, then applies
            "embedding". It preserves the function up to the spread of the final norm's gain. W has the model's dtype, to which
            all but "head" round it.
        source: which of two different tables to keep, "input" or "output". The other is discarded with a warning.
        removed: names an option of earlier drafts only to raise an error.

    Returns:
        ``model``.

    Raises:
        ValueError: untied tables without ``source``; V < d; a rank-deficient table; an embedding or head that computes more
            than a lookup or a linear map; a model that reads the embedding's weight itself; a converted, quantized or wrapped
            model. Also if a rotation changes the model's logits. The model is then unchanged.
    """
    if removed:
        name = next(iter(removed))
        raise ValueError(f"convert has no option {name}: {_REMOVED.get(name, 'see its documentation')}")
    precision.check_choice("transform", transform, Start)
    tables = read_tables(model, source)
    turned = None
    if transform == "rotation":
        if tables.untied:
            raise ValueError("transform='rotation' needs a tied model; choose another transform")
        turned = rotation(model, tables.weight)
    W = _start(tables.weight if turned is None else turned.table, "embedding" if transform == "rotation" else transform)
    if not is_built_again(model):
        raise ValueError(
            f"{type(model).__name__} cannot be built again from its config with tied tables, so it could not be loaded again"
        )
    if not is_called(model, tables.embedding):
        raise ValueError(
            f"{type(model).__name__} reads the weight of its embedding directly, so another embedding would not be used. It "
            "cannot be converted and is unchanged"
        )
    if tables.untied:
        warnings.warn(f"{type(model).__name__} had two tables; kept the {source} table. Train it again", stacklevel=2)
    if turned is None:
        _install(tables, W)
    else:
        with undisturbed(model), _restored_on_error(model, tables):
            rotate(model, turned, lambda: _install(tables, W))
    _own_config(model)
    mark(model.config, tables.scale, rotated=turned is not None)
    tie(model)
    if model.name_or_path:  # the stock checkpoint: PEFT and TRL would load that one
        model.name_or_path = model.config.name_or_path = UNSAVED
    return model


@torch.inference_mode(False)
def _start(table: Tensor, transform: Transform) -> Tensor:
    """W = U T for a table U H, in the table's dtype; ValueError if it has none."""
    pit = PIT.from_embedding(table, transform=transform)
    assert isinstance(pit, FreePIT)
    return table.detach() if transform == "head" else pit.table.detach().to(table.dtype)


def _install(tables: StockTables, W: Tensor) -> None:
    tables.weight.data = W
    tables.embedding.weight = tables.head.weight = tables.weight
    adopted = PITEmbedding.adopt(tables.embedding, tables.scale)
    if "_old_forward" in vars(adopted):  # accelerate's hook calls the forward of the class that it found
        vars(adopted)["_old_forward"] = PITEmbedding.forward.__get__(adopted)
    else:
        vars(adopted).pop("forward", None)  # the old class's, which a removed hook leaves


@contextmanager
def _restored_on_error(model: "PreTrainedModel", tables: StockTables, always: bool = False) -> Iterator[None]:
    """Undo :func:`_install` and changes of parameters if the block raises, or in any case."""
    embedding, head, failed = tables.embedding, tables.head, True
    before = {parameter: parameter.data for parameter in model.parameters()}
    kind, attributes, weights = type(embedding), dict(vars(embedding)), (embedding.weight, head.weight)
    try:
        yield
        failed = False
    finally:
        if failed or always:
            embedding.__class__ = kind
            vars(embedding).clear()
            vars(embedding).update(attributes)  # hooks, too
            embedding.weight, head.weight = weights
            for parameter, data in before.items():
                parameter.data = data


def _own_config(model: "PreTrainedModel") -> None:
    """Give the model and its submodules their own copy of the config; models built from one config object share it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if (own := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


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
        Losses under "source" (unconverted), "identity", "head" and "embedding". Models that can be rotated also get
        "rotation", unless the batch has ``inputs_embeds``, which would have to be rotated as well. "rotation" is measured on a
        copy, so the model is in memory twice.
    """
    tables = read_tables(model, source)
    if not isinstance(batch, Mapping):
        raise ValueError(f"expected a mapping such as {{'input_ids': ids}}, got a {type(batch).__name__}")
    if "labels" not in batch and "input_ids" not in batch:
        raise ValueError(f"expected labels or input_ids in the batch, got {', '.join(batch) or 'none'}; add labels")
    inputs: dict[str, Any] = {**batch, "labels": batch["labels"] if "labels" in batch else batch["input_ids"]}
    with undisturbed(model):
        losses = {"source": float(model(**inputs).loss)}
        for choice in get_args(Transform):
            with _restored_on_error(model, tables, always=True):
                _install(tables, _start(tables.weight, choice))
                losses[choice] = float(model(**inputs).loss)
        if not tables.untied and "inputs_embeds" not in inputs:
            with suppress(ValueError):  # not Llama-like
                check_plain(model)  # before the copy
                losses["rotation"] = float(convert(copy.deepcopy(model), transform="rotation")(**inputs).loss)
    return losses
