"""The two tables of a saved model, read from safetensors alone: nothing of a checkpoint is executed or unpickled."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifold_tying._json import read_object
from manifold_tying.huggingface.folder import (
    DAMAGED,
    WHOLE,
    check_options,
    read_config,
    read_shapes,
    read_tensors,
    recorded_options,
    table_names,
    weight_map,
)
from manifold_tying.tying import PIT

_OURS = "interface."
_MEMORY, _FREE = "parametrizations.memory.original", "table"


class SavedTables(NamedTuple):
    """What a folder says about its token interface."""

    E: Tensor  # (V, d)
    W_out: Tensor  # (d, V)
    description: str


def inspect_tables(path: str | Path) -> SavedTables:
    """E (V, d), W_out (d, V) and a line of description of a saved model; only these tensors are read.

    Args:
        path: a run of ``manifold-tying train`` (its newest checkpoint), one of its checkpoints, or a folder in Hugging
            Face's form with config.json. The weights may be one safetensors file or shards.

    Raises:
        ValueError: a file is missing or damaged, holds no table, or NaN or Inf in one; says which and what to do.
        ImportError: safetensors is not installed.
    """
    return saved_interface(path)[0]


def saved_interface(path: str | Path) -> tuple[SavedTables, PIT | None]:
    """:func:`inspect_tables`, and the PIT interface that the tables are of, where they are of one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"expected the folder of a run, a checkpoint or a Hugging Face model, got {folder}")
    saved = sorted((folder / "checkpoints").glob("step-*"))
    if saved:
        folder = saved[-1]
    if (folder / "state.json").exists():
        found = _of_checkpoint(folder)
    elif (folder / "config.json").exists():
        found = _of_hugging_face(folder)
    else:
        raise ValueError(
            f"{folder} has neither checkpoints/, state.json nor config.json: expected a run or a saved model"
        )
    for name, table in zip(("E", "W_out"), found[0][:2], strict=True):
        if table.ndim != 2 or not table.is_floating_point() or not torch.isfinite(table).all():
            raise ValueError(
                f"expected finite floating-point tables of two dimensions in {folder}, but {name} ({table.dtype}, shape "
                f"{tuple(table.shape)}) is not or holds NaN or Inf: the weights are damaged, or the training diverged"
            )
    return found


def _of_checkpoint(folder: Path) -> tuple[SavedTables, PIT | None]:
    state = read_object(folder / "state.json", DAMAGED)
    sharded = not (folder / WHOLE).exists() and any(folder.glob("shard-*"))
    tensors = _of_shards(folder, state) if sharded else _of_one_file(folder)
    if not ("weight" in tensors or {"embedding", "head"} <= set(tensors) or {_MEMORY, _FREE} & set(tensors)):
        found = _some(tensors) or "no interface.*"
        raise ValueError(f"{folder} holds no token interface that is known here; it has {found}")
    step, config = state.get("step"), state.get("config")
    if type(step) is not int or not isinstance(config, dict):
        raise ValueError(f"{folder / 'state.json'} is damaged: it has no step or no config; take another checkpoint")
    kind = f"checkpoint of step {step}"
    if "weight" in tensors:
        return SavedTables(tensors["weight"], tensors["weight"].mT, f"{kind}, transpose tying"), None
    if "embedding" in tensors:
        return SavedTables(tensors["embedding"], tensors["head"].mT, f"{kind}, untied"), None
    pit = _pit(tensors, folder, config)
    return SavedTables(*pit.materialize(), f"{kind}, {config.get('interface', 'pit')}"), pit


def _of_one_file(folder: Path) -> dict[str, Tensor]:
    where = dict.fromkeys(read_shapes([folder / WHOLE]), WHOLE)
    names = [name for name in where if name.startswith(_OURS)]
    return {name.removeprefix(_OURS): tensor for name, tensor in read_tensors(folder, where, names).items()}


def _of_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The interface of a checkpoint that several processes saved, each its own rows."""
    import torch.distributed.checkpoint as dcp

    files = state.get("files")
    if not isinstance(files, dict) or (missing := [name for name in files if not (folder / name).is_file()]):
        raise ValueError(f"{folder} lacks shards that its state.json names ({_some(missing if files else ())})")
    read_shapes(sorted(folder.glob("shard-*.safetensors")))  # names the file that is damaged
    reader = dcp.HuggingFaceStorageReader(str(folder))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.items()
        if name.startswith(_OURS)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    return {name.removeprefix(_OURS): tensor for name, tensor in tensors.items()}


def _pit(tensors: dict[str, Tensor], folder: Path, config: Mapping[str, Any]) -> PIT:
    free = _FREE in tensors
    names = () if free else ("diagonal", "bounds")
    options = check_options({name: config[name] for name in names if config.get(name) is not None})
    stored = tensors[_FREE if free else _MEMORY]
    if stored.ndim != 2:
        raise ValueError(f"expected a memory (V, d) in {folder}, got a tensor of shape {tuple(stored.shape)}")
    with torch.device("meta"):  # the tensors are there already
        pit = PIT(*stored.shape, memory="free" if free else "frozen", **options)
    try:
        if "bridge" in tensors:
            pit.bridge = torch.nn.Parameter(tensors["bridge"])
        pit.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds another kind of PIT than this version's: {error}") from error
    for module in pit.modules():  # buffers that say a dtype and are in no file
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"expected finite numbers in {folder}, got NaN or Inf in the interface's {', '.join(broken)}")
    return pit


def _of_hugging_face(folder: Path) -> tuple[SavedTables, PIT | None]:
    config = read_config(folder)
    entry = recorded_options(folder)
    where = weight_map(folder)
    family = f"Hugging Face {config.get('model_type', 'model')}"
    stored = tuple(_OURS + name for name in (_MEMORY, _FREE))
    converted = [name[: name.rindex(_OURS) + len(_OURS)] for name in where if name.endswith(stored)]
    if converted:  # by this package; the two halves share one interface
        names = [name for name in where if name.startswith(converted[0])]
        tensors = {
            name.removeprefix(converted[0]): tensor for name, tensor in read_tensors(folder, where, names).items()
        }
        pit = _pit(tensors, folder, config.get("quantization_config") or {})
        kind = "PIT" if pit.bridge is None else "PIT with a bridge"
        return SavedTables(*pit.materialize(), f"{family}, {kind}"), pit
    if entry is not None:
        raise ValueError(
            f"{folder} is a converted checkpoint by its config.json, but has no memory; it has {_some(where)}"
        )
    embedding, head, tied = table_names(folder, where)
    if embedding is None:
        raise ValueError(f"no embedding table among the parameters of {folder}; it has {_some(where)}")
    E = read_tensors(folder, where, [embedding])[embedding]
    if E.ndim != 2:
        raise ValueError(f"expected a table (V, d) as {embedding} in {folder}, got a tensor of shape {tuple(E.shape)}")
    if head is None and not tied:
        raise ValueError(
            f"{folder} is untied by its config.json and has no head; a shard may be missing: {_some(where)}"
        )
    if head is None:
        return SavedTables(E, E.mT, f"{family}, {embedding}, tied"), None
    table = read_tensors(folder, where, [head])[head]
    if table.shape != E.shape:
        raise ValueError(f"expected {head} of shape {tuple(E.shape)} as {embedding}, got {tuple(table.shape)}")
    tying = "tied" if torch.equal(E, table) else "untied"
    return SavedTables(E, table.mT, f"{family}, {embedding} and {head}, {tying}"), None


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
