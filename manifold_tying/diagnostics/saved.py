"""Read the two tables of a saved model from safetensors; never executes or unpickles anything in a checkpoint."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from manifold_tying._json import read_object
from manifold_tying._safetensors import DAMAGED, WHOLE, read_into, read_shapes, read_tensors, weight_map, whole_shapes
from manifold_tying.diagnostics.interface import embedding_and_head
from manifold_tying.huggingface.folder import build_empty, read_config, recorded_mark
from manifold_tying.tying import PIT, FreePIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OURS = "interface."
_MEMORY, _FREE = "parametrizations.memory.original", "table"


class SavedTables(NamedTuple):
    """The tables in a folder."""

    E: Tensor  # (V, d)
    W_out: Tensor  # (d, V)
    description: str


def inspect_tables(path: str | Path) -> SavedTables:
    """E (V, d), W_out (d, V) and a one-line description of a saved model; reads no other tensors.

    Args:
        path: a run of ``manifold-tying train`` (reads its newest checkpoint), one of its checkpoints, or a Hugging Face model
            folder with config.json. The weights may be one safetensors file or shards.

    Raises:
        ValueError: a file is missing or damaged, or has no table, or a table contains NaN or Inf.
        ImportError: safetensors is not installed, or transformers, for a Hugging Face model that is not converted.
    """
    return saved_interface(path)[0]


def saved_interface(path: str | Path) -> tuple[SavedTables, PIT | None]:
    """:func:`inspect_tables`, and the PIT interface that the tables come from, if any."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"expected the folder of a run, a checkpoint or a Hugging Face model, got {folder}")
    saved = sorted((folder / "checkpoints").glob("step-*"))
    if saved:
        folder = saved[-1]
    if (folder / "state.json").exists():
        found = _of_checkpoint(folder)
    elif (folder / "metrics.jsonl").exists():
        raise ValueError(
            f"{folder} holds a run without a checkpoint; resume it with train --resume, or give its folder model"
        )
    elif (folder / "config.json").exists():
        found = _of_hugging_face(folder)
    else:
        raise ValueError(f"{folder} has neither checkpoints/, state.json nor config.json: expected a run or model")
    for name, table in zip(("E", "W_out"), found[0][:2], strict=True):
        if table.ndim != 2 or not table.is_floating_point() or not torch.isfinite(table).all():
            raise ValueError(
                f"expected finite floating-point tables of two dimensions in {folder}, got {name} of {table.dtype} and shape "
                f"{tuple(table.shape)}, possibly with NaN or Inf: the weights are damaged, or the training diverged"
            )
    return found


def _of_checkpoint(folder: Path) -> tuple[SavedTables, PIT | None]:
    state = read_object(folder / "state.json", DAMAGED)
    if not (folder / WHOLE).exists() and any(folder.glob("shard-*")):
        tensors = _of_shards(folder, state)
    else:
        where = dict.fromkeys(read_shapes([folder / WHOLE]), WHOLE)
        tensors = read_tensors(folder, where, [name for name in where if name.startswith(_OURS)])
    tensors = {name.removeprefix(_OURS): tensor for name, tensor in tensors.items()}
    if not ("weight" in tensors or {"embedding", "head"} <= set(tensors) or {_MEMORY, _FREE} & set(tensors)):
        found = _some(tensors) or "no interface.*"
        raise ValueError(
            f"expected a token interface of this package in {folder}, got {found}. A run with init_from has it in its folder "
            "model, written at the end: give that one"
        )
    step, config = state.get("step"), state.get("config")
    if type(step) is not int or not isinstance(config, dict):
        raise ValueError(f"{folder / 'state.json'} is damaged: it has no step or no config; take another checkpoint")
    kind = f"checkpoint of step {step}"
    scale = tensors["log_scale"].exp() if "log_scale" in tensors else 1.0
    if "weight" in tensors:
        return SavedTables(tensors["weight"], scale * tensors["weight"].mT, f"{kind}, transpose tying"), None
    if "embedding" in tensors:
        return SavedTables(tensors["embedding"], scale * tensors["head"].mT, f"{kind}, untied"), None
    pit = _pit(tensors, folder, config)
    return SavedTables(*pit.materialize(), f"{kind}, {config.get('interface', 'pit')}"), pit


def _of_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The interface in a checkpoint of a distributed run, to which each process wrote its own rows."""
    files = state.get("files")
    if not isinstance(files, dict) or (missing := [name for name in files if not (folder / name).is_file()]):
        raise ValueError(f"{folder} lacks shards that its state.json names ({_some(missing if files else ())})")
    ours = {name: of for name, of in whole_shapes(folder).items() if name.startswith(_OURS)}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in ours.items()}
    read_into(folder, tensors)
    return tensors


def _pit(tensors: dict[str, Tensor], folder: Path, config: Mapping[str, Any]) -> PIT:
    free = _FREE in tensors
    options = {"diagonal": config["diagonal"]} if not free and config.get("diagonal") is not None else {}
    stored = tensors[_FREE if free else _MEMORY]
    if stored.ndim != 2:
        raise ValueError(f"expected a memory (V, d) in {folder}, got a tensor of shape {tuple(stored.shape)}")
    with torch.device("meta"):
        pit = PIT(*stored.shape, memory="free" if free else "frozen", **options)
    try:
        pit.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the PIT interface in {folder} does not match this version's: {error}") from error
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"expected finite numbers in {folder}, got NaN or Inf in the interface's {', '.join(broken)}")
    return pit


def _of_hugging_face(folder: Path) -> tuple[SavedTables, PIT | None]:
    config, converted = read_config(folder), recorded_mark(folder) is not None
    where = weight_map(folder)
    has = _some(where)
    family = f"Hugging Face {config.get('model_type', 'model')}"
    embedding, head, tied = _table_names(folder, where)
    if embedding is None:
        raise ValueError(f"no embedding table among the parameters of {folder}; it has {has}")
    E = read_tensors(folder, where, [embedding])[embedding]
    if E.ndim != 2:
        raise ValueError(f"expected a table (V, d) as {embedding} in {folder}, got a tensor of shape {tuple(E.shape)}")
    if converted:
        if not (head is None and tied):
            raise ValueError(f"config.json says that {folder} is converted, but it has two tables; it has {has}")
        pit = FreePIT.share(E)
        try:
            return SavedTables(*pit.materialize(), f"{family}, PIT"), pit
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
    if head is None and tied:
        return SavedTables(E, E.mT, f"{family}, {embedding}, tied"), None
    if head is None:
        raise ValueError(f"config.json says that {folder} is untied, but it has no head; a shard may be missing: {has}")
    table = read_tensors(folder, where, [head])[head]
    if table.shape != E.shape:
        raise ValueError(f"expected {head} to have {embedding}'s shape {tuple(E.shape)}, got {tuple(table.shape)}")
    tying = "tied" if torch.equal(E, table) else "untied"
    return SavedTables(E, table.mT, f"{family}, {embedding} and {head}, {tying}"), None


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _table_names(folder: Path, where: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    """(embedding's name, head's name, whether a missing head is the embedding); ``where`` maps each tensor to its file.

    By what the model's class calls them.
    """
    model = build_empty(folder)
    names = {module: name for name, module in model.named_modules()}
    try:
        inside, outside = (f"{names[module]}.weight" for module in embedding_and_head(model))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    pairs: Mapping[str, str] = model.all_tied_weights_keys
    source = pairs.get(inside, inside)
    tied = {source, *(target for target, of in pairs.items() if of == source)} - {inside}
    table, score = _stored(model, (inside, *sorted(tied)), where), _stored(model, (outside,), where)
    return table, None if score == table else score, outside in tied


def _stored(model: "PreTrainedModel", names: Sequence[str], where: Collection[str]) -> str | None:
    """The stored name of the parameter that the model calls ``names``, or None.

    Some classes rename parameters when they save. Checkpoints of base models lack a prefix; then the only stored name with the
    longest common suffix matches.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameter = torch.empty(1, 1, device="meta")
    saved = [name for own in names for name in revert_weight_conversion(model, {own: parameter})]
    if exact := [name for name in (*saved, *names) if name in where]:
        return exact[0]
    ends = {found: max(_common_end(name, found) for name in names) for found in where}
    longest = max(ends.values(), default=0)
    best = [found for found, length in ends.items() if length == longest]
    return best[0] if longest >= 2 and len(best) == 1 else None  # 1 part is only "weight"


def _common_end(left: str, right: str) -> int:
    pairs = zip(reversed(left.split(".")), reversed(right.split(".")), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(left.count("."), right.count(".")) + 1)
