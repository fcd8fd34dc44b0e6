"""Checkpoints: a folder of safetensors and JSON, written beside its place and renamed, read without executing anything."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from manifold_tying.optim import MergeSchedule
from manifold_tying.training._probes import Probes

FORMAT = 2
KEPT = 2  # newest checkpoints of a run
_FOLDER = "checkpoints"
_MODEL, _OPTIMIZER, _PROBES, _STATE = "model.safetensors", "optimizer.safetensors", "probes.safetensors", "state.json"


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    *,
    schedule: MergeSchedule | None = None,
    probes: Probes | None = None,
) -> Path:
    """Write ``RUN/checkpoints/step-STEP`` and drop all but the newest ``KEPT``."""
    final = run / _FOLDER / f"step-{step:08d}"
    draft = final.with_name(f".{final.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, draft / _MODEL)
        state = optimizer.state_dict()
        tensors = {f"{i}.{k}": v.contiguous() for i, values in state["state"].items() for k, v in values.items()}
        save_file(tensors, draft / _OPTIMIZER)
        save_file(probes.state_dict() if probes else {}, draft / _PROBES)
        sizes = {name: (draft / name).stat().st_size for name in (_MODEL, _OPTIMIZER, _PROBES)}
        content = {
            "format": FORMAT, "step": step, "config": config, "sizes": sizes, "param_groups": state["param_groups"],
            "schedule": schedule.state_dict() if schedule else None,
        }  # fmt: skip
        (draft / _STATE).write_text(json.dumps(content, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in checkpoints(run)[:-KEPT]:
        shutil.rmtree(old)
    return final


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((run / _FOLDER).glob("step-*"))


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Mapping[str, Any],
    *,
    schedule: MergeSchedule | None = None,
    probes: Probes | None = None,
) -> int:
    """Fill the model, and what else is given, from a checkpoint and return its step.

    ValueError, before anything is changed, where a file is missing, truncated or damaged, or where the checkpoint is of
    another configuration.
    """
    state = read_state(path)
    different = [k for k in sorted({*config, *state["config"]}) if config.get(k) != state["config"].get(k)]
    if different:
        details = ", ".join(f"{k}={state['config'].get(k)!r} there, {config.get(k)!r} here" for k in different)
        raise ValueError(f"checkpoint {path} is of another configuration: {details}. Use the same, or another folder")
    weights = read_tensors(path, _MODEL, state)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in weights.items()}
    if expected != found:
        names = sorted(k for k in {*expected, *found} if expected.get(k) != found.get(k))
        raise ValueError(
            f"checkpoint {path} does not fit the model: {', '.join(names[:5])} differ in shape or presence"
        )
    probed = read_tensors(path, _PROBES, state)
    if optimizer is not None:
        per_parameter: dict[int, dict[str, Tensor]] = {}
        for name, tensor in read_tensors(path, _OPTIMIZER, state).items():
            index, _, key = name.partition(".")
            per_parameter.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": per_parameter, "param_groups": state["param_groups"]})
    model.load_state_dict(weights)
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])
    if probes is not None:
        probes.load_state_dict(probed)
    return state["step"]


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, checked against the files beside it."""
    try:
        state = json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {_STATE} cannot be read ({error}). {_advice(path)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"checkpoint {path} has format {got!r}, this version reads format {FORMAT}")
    return state


def read_tensors(path: Path, name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """One safetensors file of a checkpoint."""
    file, expected = path / name, state["sizes"][name]
    size = file.stat().st_size if file.exists() else None
    if size != expected:
        got = "is missing" if size is None else f"has {size} of {expected} bytes"
        raise ValueError(f"checkpoint {path} is damaged: {name} {got}. {_advice(path)}")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path} is damaged: {name} cannot be read ({error}). {_advice(path)}") from error


def _advice(path: Path) -> str:
    older = [other.name for other in checkpoints(path.parent.parent) if other.name < path.name]
    return f"Delete it to go on from {older[-1]}" if older else "Delete it to start anew"
