"""Read the two tables of a saved model; never executes or unpickles anything in a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifold_tying._json import read_object
from manifold_tying._safetensors import DAMAGED, read_into, whole_shapes
from manifold_tying.diagnostics.interface import interface_tables
from manifold_tying.huggingface.checkpoint import load, load_stock, recorded_mark
from manifold_tying.huggingface.native import pit_embedding
from manifold_tying.tying import PIT, FreePIT

_OURS = "interface."
_MEMORY, _FREE = "parametrizations.memory.original", "table"


class SavedTables(NamedTuple):
    """The tables in a folder."""

    E: Tensor  # (V, d)
    W_out: Tensor  # (d, V)
    description: str


def inspect_tables(path: str | Path) -> SavedTables:
    """E (V, d), W_out (d, V) and a one-line description of a saved model. A Hugging Face model is loaded whole.

    Args:
        path: a run of ``manifold-tying train`` (reads its newest checkpoint), one of its checkpoints, or a Hugging Face model
            folder with config.json. The weights may be one safetensors file or shards.

    Raises:
        ValueError: a file is missing or damaged, or has no table, or a table contains NaN or Inf.
        ImportError: safetensors is not installed, or transformers, for a Hugging Face model.
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
    step, config, files = (state.get(key) for key in ("step", "config", "files"))
    if type(step) is not int or not isinstance(config, dict) or not isinstance(files, dict):
        raise ValueError(f"{folder / 'state.json'} is damaged: it lacks step, config or files; take another checkpoint")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks files that its state.json names ({_some(missing)})")
    ours = {name: of for name, of in whole_shapes(folder).items() if name.startswith(_OURS)}
    stored = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in ours.items()}
    read_into(folder, stored)
    tensors = {name.removeprefix(_OURS): tensor for name, tensor in stored.items()}
    if not ("weight" in tensors or {"embedding", "head"} <= set(tensors) or {_MEMORY, _FREE} & set(tensors)):
        found = _some(tensors) or "no interface.*"
        raise ValueError(
            f"expected a token interface of this package in {folder}, got {found}. A run with init_from has it in its folder "
            "model, written at the end: give that one"
        )
    kind = f"checkpoint of step {step}"
    scale = tensors["log_scale"].exp() if "log_scale" in tensors else 1.0
    if "weight" in tensors:
        return SavedTables(tensors["weight"], scale * tensors["weight"].mT, f"{kind}, transpose tying"), None
    if "embedding" in tensors:
        return SavedTables(tensors["embedding"], scale * tensors["head"].mT, f"{kind}, untied"), None
    pit = _pit(tensors, folder, config)
    return SavedTables(*pit.materialize(), f"{kind}, {config.get('interface', 'pit')}"), pit


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
    converted = recorded_mark(folder) is not None
    try:
        model: Any = (load if converted else load_stock)(folder)
        E, W_out = interface_tables(model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    pit = FreePIT.share(pit_embedding(model).weight) if converted else None
    tying = "PIT" if converted else "tied" if torch.equal(E, W_out.T) else "untied"
    return SavedTables(E, W_out, f"Hugging Face {model.config.model_type}, {tying}"), pit


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
