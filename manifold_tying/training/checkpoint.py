"""Read checkpoints: folders of safetensors and JSON, no pickle. ``saving`` writes them.

A single process, or DDP, writes model.safetensors, optimizer.safetensors and probes.safetensors. A sharded run writes one
safetensors file per rank with torch.distributed.checkpoint. Any number of ranks can read either.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import distributed
from manifold_tying._json import parsed, read_bytes
from manifold_tying._safetensors import read_into, whole_shapes
from manifold_tying.optim import MergeSchedule, RiemannianAdam
from manifold_tying.training.config import check_same
from manifold_tying.training.files import Damaged, digest
from manifold_tying.training.probes import Probes
from manifold_tying.training.processes import ALONE, Processes

FORMAT = 3
FOLDER = "checkpoints"
STATE = "state.json"


def checkpoints(run: str | Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((Path(run) / FOLDER).glob("step-*"))


def set_newer_aside(path: Path) -> None:
    """Rename the checkpoints newer than this one to ``aside-*``."""
    for other in checkpoints(path.parent.parent):
        if other.name > path.name:
            set_aside(other)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint to ``aside-*``, so that no run resumes from it."""
    aside = path.with_name(f"aside-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: RiemannianAdam | None,
    config: Mapping[str, Any],
    *,
    schedule: MergeSchedule | None = None,
    probes: Probes | None = None,
    processes: Processes = ALONE,
) -> int:
    """Load a checkpoint into the model and the other objects given, and return its step.

    The number of ranks may differ from when it was saved. Everything is checked before anything is changed.

    Raises:
        Damaged: a file is missing, truncated or changed by even one bit.
        ValueError: the checkpoint has another configuration or was trained on another text.
    """
    state = processes.raise_together(lambda: _checked_state(path, config, processes))
    tensors = processes.raise_together(lambda: _read(path, model, optimizer, probes))
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    if optimizer is not None:
        per_parameter: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("optimizer.")]:
            _, index, key = name.split(".", 2)
            per_parameter.setdefault(int(index), {})[key] = tensors[name]
        optimizer.load_state_dict({"state": per_parameter, "param_groups": state["param_groups"]})
    if schedule is not None:
        schedule.load_state_dict(state["schedule"])
    if probes is not None:
        probes.load_state_dict({name: tensors[f"probes.{name}"] for name in probes.state_dict()})
    return int(state["step"])


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, checked against its own digest."""
    try:
        text = read_bytes(path / STATE).decode()
        state = parsed(text)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{STATE} cannot be read ({error})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        got = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"checkpoint {path} has format {got!r}, expected {FORMAT}; use the version that wrote it")
    unchanged = json.dumps(state, indent=1) == text  # the digest of the values would miss changed formatting
    if state.pop("digest", None) != digest_of_state(state) or not unchanged:
        raise _damaged(path, f"{STATE} was changed")
    return state


def digest_of_state(state: Mapping[str, Any]) -> str:
    """SHA-256 of the JSON part without its own digest."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def check_files(path: Path, state: Mapping[str, Any], processes: Processes = ALONE) -> None:
    """Raise Damaged unless every file has its recorded digest; the ranks divide the files among them."""
    existing = {file.name for file in path.glob("*.safetensors")}
    if extra := existing - set(state["files"]):
        raise ValueError(f"checkpoint {path} has files that it was not saved with: {', '.join(sorted(extra))}")
    for name in sorted(state["files"])[processes.rank :: processes.size]:
        if name not in existing:
            raise _damaged(path, f"{name} is missing")
        if digest(path / name) != state["files"][name]:
            raise _damaged(path, f"{name} ({(path / name).stat().st_size} bytes) is not what was written")


def _checked_state(path: Path, config: Mapping[str, Any], processes: Processes) -> dict[str, Any]:
    state = read_state(path)
    check_same(f"checkpoint {path}", "has another configuration:", state["config"], config)
    check_files(path, state, processes)
    return state


def _read(path: Path, model: nn.Module, optimizer: RiemannianAdam | None, probes: Probes | None) -> dict[str, Tensor]:
    """This rank's part of every tensor to load."""
    stored = whole_shapes(path)
    tensors = {k: torch.empty_like(v) for k, v in model.state_dict().items()}
    if probes is not None:
        tensors |= {f"probes.{k}": torch.empty_like(v) for k, v in probes.state_dict().items()}
    if optimizer is not None:
        trained = {name.rpartition(".")[0] for name in stored}  # a parameter without gradients has no state
        parameters = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        tensors |= {
            f"optimizer.{i}.{key}": _empty(shape, torch.float32 if key == "step" else p.dtype, p)
            for i, (group, p) in enumerate(parameters)
            if f"optimizer.{i}" in trained
            for key, shape in optimizer.state_shapes(group, p).items()
        }
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    unread = tuple(part for part, reader in (("optimizer.", optimizer), ("probes.", probes)) if reader is None)
    found = {name: kind for name, kind in stored.items() if not name.startswith(unread)}
    # Of the optimizer's state, too: torch's kernels would write past its end.
    if wrong := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        part = wrong[0].partition(".")[0]
        what = part if part in ("optimizer", "probes") else "model"
        listed = ", ".join(f"{name} is {_kind(found.get(name))}, not {_kind(expected.get(name))}" for name in wrong[:5])
        raise ValueError(f"checkpoint {path} does not fit the {what}: {listed}. Resume from another checkpoint")
    read_into(path, tensors)
    return tensors


def _kind(of: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if of is None else f"{tuple(of[0])} in {str(of[1]).removeprefix('torch.')}"


def _empty(shape: torch.Size, dtype: torch.dtype, p: Tensor) -> Tensor:
    """An empty state tensor of the parameter p, sharded like p if it has p's rows."""
    if distributed.is_dtensor(p) and shape[:-1] == p.shape[:-1] and len(shape) == p.ndim:
        like = p.detach()
        return torch.empty_like(like if shape == p.shape else like[..., : shape[-1]], dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def _damaged(path: Path, what: str) -> Damaged:
    return Damaged(f"checkpoint {path} is damaged: {what}. {advice(path)}")


def advice(path: Path) -> str:
    """How to recover from a damaged checkpoint."""
    older = [other.name for other in checkpoints(path.parent.parent) if other.name < path.name]
    if older:
        return f"Resume from the one before it with --resume-from {older[-1]}"
    return "There is no older one: start in another folder, or delete it to start over"
