"""Writing checkpoints: to a draft folder, which is then renamed. ``_checkpoint`` reads them.

:func:`stage_checkpoint` copies the state. :func:`write_checkpoint` writes the copy in a thread, while training continues.
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

KEPT = 2  # by default, of the newest checkpoints
_MODEL, _OPTIMIZER, _PROBES = "model.safetensors", "optimizer.safetensors", "probes.safetensors"
_ALONE = Processes()


@dataclass(frozen=True)
class Staged:
    """A copy of what this rank writes of the state after a step."""

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
    """Copy the state to the CPU. Not collective.

    Each rank copies its shards of DTensors. Without DTensors rank 0 copies everything and the others nothing.
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
    if not processes.is_main and not _sharded(parts):
        parts = {}
    copies = {  # steps and merges change the tensors in place
        part: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }
    return Staged(step, copies, copy.deepcopy(content))


def write_checkpoint(run: Path, staged: Staged, processes: Processes = _ALONE, *, keep: int | None = KEPT) -> Path:
    """Write ``RUN/checkpoints/step-STEP`` and delete all but the newest ``keep``. Collective.

    The folder appears complete or not at all. If one rank cannot write, all raise ValueError or OSError, and the earlier
    checkpoints remain.
    """
    final = run / FOLDER / f"step-{staged.step:08d}"
    draft = final.with_name(f".{final.name}.draft")
    try:
        processes.from_main(lambda: _make_empty(draft))
        if _sharded(staged.parts):
            mine = processes.raise_together(lambda: write_shards(draft, staged.parts, processes.rank, processes.group))
            files = processes.all_gather(mine)
        else:
            files = [processes.from_main(lambda: write_tensors(draft, staged.parts))]
        digests = {name: value for found in files for name, value in found.items()}
        content = {**staged.content, "processes": processes.size, "files": digests}
        processes.from_main(lambda: _publish(draft, final, content, keep))
    finally:
        if processes.is_main:
            shutil.rmtree(draft, ignore_errors=True)
    return final


def export_model(path: Path, out: Path) -> None:
    """Write a checkpoint's model, unsharded, to ``OUT/model.safetensors``, and its configuration to ``OUT/state.json``."""
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
    """Rename the draft. An old folder is renamed before it is deleted, so that no reader finds half of one."""
    _write_state(draft, content)
    flush_to_disk(draft)
    _remove(final)
    os.replace(draft, final)
    flush_to_disk(final.parent)
    for old in checkpoints(final.parent.parent)[: -keep if keep else 0]:
        _remove(old)
    for left in final.parent.glob(".*.old"):  # from a killed process
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
