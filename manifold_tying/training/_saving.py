"""Checkpoints are written here: beside their place, then renamed; ``_checkpoint`` reads them.

In two parts, since training goes on between them: :func:`stage_checkpoint` copies the state of a step, and
:func:`write_checkpoint` writes the copy, in the thread of a :class:`CheckpointWriter`.
"""

import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manifold_tying import linalg
from manifold_tying.optim import MergeSchedule
from manifold_tying.training._checkpoint import (
    FOLDER,
    FORMAT,
    STATE,
    check_files,
    checkpoints,
    digest_of_state,
    read_state,
)
from manifold_tying.training._files import digest, flush_to_disk
from manifold_tying.training._probes import Probes
from manifold_tying.training._processes import Processes
from manifold_tying.training._tensors import read_shapes, read_tensors, write_file, write_shards, write_tensors

KEPT = 2  # newest checkpoints of a run, where it does not say how many
_MODEL, _OPTIMIZER, _PROBES = "model.safetensors", "optimizer.safetensors", "probes.safetensors"
_ALONE = Processes()


@dataclass(frozen=True)
class Staged:
    """What this process is to write of a run's state after a step, in memory that nothing else changes."""

    step: int
    parts: dict[str, dict[str, Tensor]]
    content: dict[str, Any]


def stage_checkpoint(
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    *,
    schedule: MergeSchedule | None = None,
    probes: Probes | None = None,
    processes: Processes = _ALONE,
) -> Staged:
    """Copy to the CPU what a checkpoint of this step consists of; no process waits for another.

    Of DTensors each process copies its share; where there are none, the process that writes copies all and the others nothing.
    """
    state = optimizer.state_dict()
    parts = {
        _MODEL: model.state_dict(),
        _OPTIMIZER: {f"optimizer.{i}.{k}": v for i, values in state["state"].items() for k, v in values.items()},
        _PROBES: {f"probes.{k}": v for k, v in probes.state_dict().items()} if probes else {},
    }
    content = {
        "format": FORMAT, "step": step, "config": config, "param_groups": state["param_groups"],
        "schedule": schedule.state_dict() if schedule else None,
    }  # fmt: skip
    if not processes.writes and not _sharded(parts):
        parts = {}
    copies = {  # since steps and merges change the tensors in place
        part: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }
    return Staged(step, copies, copy.deepcopy(content))


def write_checkpoint(run: Path, staged: Staged, processes: Processes = _ALONE, *, keep: int | None = KEPT) -> Path:
    """Write ``RUN/checkpoints/step-STEP`` and drop all but the newest ``keep``; all processes of a run call it.

    A reader finds the folders that were there or also the new one, never a part of one. ValueError or OSError on all
    processes where one of them cannot write; what was there is then still there.
    """
    final = run / FOLDER / f"step-{staged.step:08d}"
    draft = final.with_name(f".{final.name}.draft")
    try:
        processes.first(lambda: _make_empty(draft))
        if _sharded(staged.parts):
            mine = processes.together(lambda: write_shards(draft, staged.parts, processes.rank, processes.group))
            files = processes.gather(mine)
        else:
            files = [processes.first(lambda: write_tensors(draft, staged.parts))]
        digests = {name: value for found in files for name, value in found.items()}
        content = {**staged.content, "processes": processes.size, "files": digests}
        processes.first(lambda: _publish(draft, final, content, keep))
    finally:
        if processes.writes:
            shutil.rmtree(draft, ignore_errors=True)
    return final


def export_model(path: Path, out: Path) -> None:
    """Write the model of a checkpoint to ``OUT/model.safetensors``, whole, and what is known of it to ``OUT/state.json``."""
    state = read_state(path)
    check_files(path, state)
    found = {k: v for k, v in read_shapes(path).items() if not k.startswith(("optimizer.", "probes."))}
    tensors = {k: torch.empty(shape, dtype=dtype) for k, (shape, dtype) in found.items()}
    read_tensors(path, tensors)
    out.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "step": state["step"], "config": state["config"]}
    _make_empty(draft := out.with_name(f".{out.name}.draft"))
    try:
        write_file(tensors, draft / _MODEL)
        _write_state(draft, {**content, "files": {_MODEL: digest(draft / _MODEL)}})
        for name in (_MODEL, STATE):
            os.replace(draft / name, out / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sharded(parts: dict[str, dict[str, Tensor]]) -> bool:
    return any(linalg.is_dtensor(tensor) for tensors in parts.values() for tensor in tensors.values())


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(draft: Path, final: Path, content: dict[str, Any], keep: int | None) -> None:
    """Give the draft its name. A folder is always there whole or not at all: what goes is renamed before it is deleted."""
    _write_state(draft, content)
    flush_to_disk(draft)
    _remove(final)
    os.replace(draft, final)
    flush_to_disk(final.parent)
    for old in checkpoints(final.parent.parent)[: -keep if keep else 0]:
        _remove(old)
    for left in final.parent.glob(".*.old"):  # by a process that was killed
        shutil.rmtree(left)


def _write_state(folder: Path, content: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps({**content, "digest": digest_of_state(content)}, indent=1))
    flush_to_disk(folder / STATE)


def _remove(path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        shutil.rmtree(old)
