"""Write checkpoints to a draft folder, then rename it. ``checkpoint`` reads them.

:func:`stage_checkpoint` copies the state. :func:`write_checkpoint` writes the copy in a thread while training continues.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from manifold_tying import distributed
from manifold_tying._safetensors import read_into, whole_shapes
from manifold_tying.optim import MergeSchedule
from manifold_tying.training import checkpoint as reading
from manifold_tying.training.files import digest, flush_to_disk
from manifold_tying.training.probes import Probes
from manifold_tying.training.processes import ALONE, Processes

KEPT = 2  # number of newest checkpoints kept by default
_MODEL, _OPTIMIZER, _PROBES = "model.safetensors", "optimizer.safetensors", "probes.safetensors"


@dataclass(frozen=True)
class Staged:
    """A copy of this rank's part of the state after a step."""

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
    processes: Processes = ALONE,
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
        "format": reading.FORMAT, "step": step, "config": config, "param_groups": state["param_groups"],
        "schedule": schedule.state_dict() if schedule else None,
    }  # fmt: skip
    if not processes.is_main and not _sharded(parts):
        parts = {}
    copies = {  # steps and merges change the tensors in place
        part: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }
    return Staged(step, copies, copy.deepcopy(content))


def write_checkpoint(run: Path, staged: Staged, processes: Processes = ALONE, *, keep: int | None = KEPT) -> Path:
    """Write ``RUN/checkpoints/step-STEP`` and delete all but the newest ``keep``. Collective.

    The folder appears complete or not at all. If one rank cannot write, all raise ValueError or OSError, and the earlier
    checkpoints remain.
    """
    final = run / reading.FOLDER / f"step-{staged.step:08d}"
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
    state = reading.read_state(path)
    reading.check_files(path, state)
    found = {k: v for k, v in whole_shapes(path).items() if not k.startswith(("optimizer.", "probes."))}
    tensors = {k: torch.empty(shape, dtype=dtype) for k, (shape, dtype) in found.items()}
    read_into(path, tensors)
    out.mkdir(parents=True, exist_ok=True)
    content = {"format": reading.FORMAT, "step": state["step"], "config": state["config"]}
    _make_empty(draft := out.with_name(f".{out.name}.draft"))
    try:
        _write_state(draft, {**content, "files": write_tensors(draft, {_MODEL: tensors})})
        for name in (_MODEL, reading.STATE):
            os.replace(draft / name, out / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sharded(parts: dict[str, dict[str, Tensor]]) -> bool:
    return any(distributed.is_dtensor(tensor) for tensors in parts.values() for tensor in tensors.values())


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(draft: Path, final: Path, content: dict[str, Any], keep: int | None) -> None:
    """Rename the draft. An old folder is renamed before it is deleted, so that no reader sees a partial one."""
    _write_state(draft, content)
    flush_to_disk(draft)
    _remove(final)
    os.replace(draft, final)
    flush_to_disk(final.parent)
    for old in reading.checkpoints(final.parent.parent)[: -keep if keep else 0]:
        _remove(old)
    for left in final.parent.glob(".*.old"):  # from a killed process
        shutil.rmtree(left)


def _write_state(folder: Path, content: dict[str, Any]) -> None:
    (folder / reading.STATE).write_text(json.dumps({**content, "digest": reading.digest_of_state(content)}, indent=1))
    flush_to_disk(folder / reading.STATE)


def _remove(path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        shutil.rmtree(old)


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints to ``RUN/checkpoints``, one at a time. Leaving its ``with`` block waits for the last one.

    Every rank has one and calls it at the same steps. The threads have their own process group, since collectives of one
    group must run in the same order on all ranks. ``timeout``: seconds that a thread waits for the other ranks' threads.
    ``keep``: number of newest checkpoints to keep; None keeps all.
    """

    def __init__(self, run: Path, processes: Processes, timeout: float, keep: int | None) -> None:
        self._run = run
        self._keep = keep
        self._processes = processes.with_own_group(timeout)
        # A new thread starts on CUDA device 0.
        prepare = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoints", initializer=prepare)
        self._newest: Future[Path] | None = None

    def write(self, stage: Callable[[], Staged]) -> None:
        """Copy the state with ``stage()`` and start writing it.

        First waits for the previous checkpoint and raises its error, so that only one copy exists at a time.
        """
        self.wait()
        self._newest = self._thread.submit(write_checkpoint, self._run, stage(), self._processes, keep=self._keep)

    def wait(self) -> None:
        """Wait for the newest checkpoint; raises its ValueError or OSError on all ranks."""
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.result()

    def kept(self) -> list[str]:
        """Names of the existing checkpoints, oldest first."""
        self.wait()
        return self._processes.from_main(lambda: [path.name for path in reading.checkpoints(self._run)])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"The newest checkpoint could not be written: {failed}")
        finally:
            self._thread.shutdown()
        if error is None:
            self._processes.close()


def write_tensors(draft: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Write and fsync one file per part; returns their digests. Raises OSError if that fails."""
    for name, tensors in parts.items():
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, draft / name)
        except SafetensorError as error:
            raise OSError(f"cannot write {draft / name}: {error}") from error
        flush_to_disk(draft / name)
    return {name: digest(draft / name) for name in parts}


def write_shards(
    draft: Path, parts: Mapping[str, Mapping[str, Tensor]], rank: int, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Write one file per rank with its shards of all parts; returns the digests of this rank's files. Collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writer = dcp.HuggingFaceStorageWriter(str(draft), save_distributed=True)
        dcp.save({k: v for part in parts.values() for k, v in part.items()}, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # on every rank, with the failure of each
        raise OSError(f"cannot write {draft}: {next(iter(error.failures.values()))[0]}") from error
    mine = list(draft.glob(f"shard-{rank + 1:05d}-*"))
    for file in mine:
        flush_to_disk(file)
    return {file.name: digest(file) for file in mine}
