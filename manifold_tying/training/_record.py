"""The files that a run writes while it goes: one JSON object per step, and TensorBoard events.

What depends on the clock has a file of its own, so that the metrics of a resumed run equal those of an uninterrupted one.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from manifold_tying.training._files import write_whole

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
PROBES = "probes.jsonl"  # before the first step and at every evaluation


class Record:
    """Appends to ``DIR/metrics.jsonl``, timing.jsonl and probes.jsonl; lines after ``start`` are dropped first.

    Attributes:
        seconds: training time so far, of the run that is resumed too.
        losses: training loss of every step so far that was not skipped.
        skipped: how many of the newest steps in a row were skipped.
        last: the metrics of the newest step.
    """

    def __init__(self, directory: Path, start: int) -> None:
        kept = _truncate(directory / METRICS, start)
        times = _truncate(directory / TIMING, start)
        probed = _truncate(directory / PROBES, start)
        evaluated = sum("val_loss" in line for line in kept)
        for name, found, expected in ((METRICS, kept, start), (TIMING, times, start), (PROBES, probed, 1 + evaluated)):
            if start and len(found) < expected:
                raise ValueError(
                    f"{directory / name} has {len(found)} of the {expected} lines before the checkpoint of step {start}; "
                    "start in another folder"
                )
        self.losses = [line["loss"] for line in kept if not line.get("skipped")]
        self.skipped = 0  # steps in a row, up to now
        for line in kept:
            self._count(line)
        self.last: dict[str, Any] = kept[-1] if kept else {}
        self.seconds = times[-1]["seconds"] if times else 0.0
        self._metrics = (directory / METRICS).open("a", encoding="utf-8")
        self._timing = (directory / TIMING).open("a", encoding="utf-8")
        self._probes = (directory / PROBES).open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory), purge_step=start + 1)

    def write(self, metrics: dict[str, Any], seconds: float) -> None:
        """One step: its metrics, and the time that it took."""
        if not metrics.get("skipped"):
            self.losses.append(metrics["loss"])
        self._count(metrics)
        self.last = metrics
        self.seconds += seconds
        step = metrics["step"]
        self._metrics.write(json.dumps(finite(metrics)) + "\n")
        self._timing.write(json.dumps({"step": step, "seconds": round(self.seconds, 6)}) + "\n")
        self._plot(metrics)

    def complete(self, measured: dict[str, Any]) -> None:
        """Add an evaluation to the newest step, whose line was written without it."""
        self.last = self.last | measured
        self.flush()
        self._metrics.close()
        path = Path(self._metrics.name)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
        write_whole(path, "".join([*lines, json.dumps(finite(self.last)) + "\n"]).encode())
        self._metrics = path.open("a", encoding="utf-8")
        self._plot({"step": self.last["step"], **measured})

    def _plot(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name not in ("step", "skipped") and value is not None:
                self._events.add_scalar(name, value, metrics["step"])

    def _count(self, metrics: dict[str, Any]) -> None:
        self.skipped = self.skipped + 1 if metrics.get("skipped") else 0

    def write_probes(self, numbers: dict[str, Any]) -> None:
        """One evaluation's look at the weights."""
        self._probes.write(json.dumps(numbers) + "\n")

    def flush(self) -> None:
        """Everything written so far reaches the disk; called before a checkpoint that counts on it."""
        self._events.flush()
        for file in (self._metrics, self._timing, self._probes):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._timing, self._probes, self._events):
            file.close()


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and Inf, which JSON does not have, as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _truncate(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Keep the whole lines of steps up to last_step, none where that is 0, and return them."""
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            entry = _entry(line)
            if entry is None or entry["step"] > last_step or not last_step:
                break
            kept.append((line, entry))
        write_whole(path, "".join(line for line, _ in kept).encode())
    return [entry for _, entry in kept]


def _entry(line: str) -> dict[str, Any] | None:
    """The object of a line; None where it is not whole, as the last one of a run that was killed may be."""
    if not line.endswith("\n"):
        return None
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None
