"""The files that a run writes while it goes: one JSON object per step, and TensorBoard events.

What depends on the clock has a file of its own, so that the metrics of a resumed run equal those of an uninterrupted one.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from manifold_tying._json import parsed, read_bytes
from manifold_tying.training._files import write_whole

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
PROBES = "probes.jsonl"  # before the first step and at every evaluation
EVALUATED = ("val_loss", "defect", "delta_ti", "cond_transform", "orthogonality_error")


@dataclass(frozen=True)
class Log:
    """One of these files: the lines up to a checkpoint, and what comes after them."""

    path: Path
    entries: list[dict[str, Any]]
    kept: bytes
    rest: bytes

    def cut(self) -> None:
        """Drop what comes after the checkpoint; it goes to the end of aside-NAME."""
        if self.rest:
            whole_line = b"" if self.rest.endswith(b"\n") else b"\n"
            with self.path.with_name(f"aside-{self.path.name}").open("ab") as aside:
                aside.write(self.rest + whole_line)
            write_whole(self.path, self.kept)


@dataclass(frozen=True)
class Logs:
    """The files of a run that resumes."""

    metrics: Log
    timing: Log
    probes: Log

    @property
    def seconds(self) -> float:
        """Training time up to the checkpoint."""
        return self.timing.entries[-1]["seconds"] if self.timing.entries else 0.0


def read_logs(directory: Path, start: int) -> Logs:
    """The logs up to the checkpoint of step ``start``, checked; nothing is written.

    ValueError where a line up to the checkpoint is missing or damaged. The evaluation of the newest step may be missing, since
    a signal can cut it short.
    """
    metrics = _read_log(directory / METRICS, range(1, start + 1), start)
    for number, line in enumerate(metrics.entries, start=1):
        measured = EVALUATED if "val_loss" in line else ()
        _check(metrics.path, number, start, line, () if line.get("skipped") else ("loss",), measured)
    timing = _read_log(directory / TIMING, range(1, start + 1), start)
    for number, line in enumerate(timing.entries, start=1):
        _check(timing.path, number, start, line, ("seconds",))
        if line["seconds"] <= 0:
            raise _damaged(timing.path, number, start, f"expected seconds > 0, got {line['seconds']}")
    looks = [0] if start else []
    looks += [line["step"] for line in metrics.entries if "val_loss" in line]
    probes = _read_log(directory / PROBES, looks, start)
    if start and start not in looks and (first := probes.rest.splitlines(keepends=True)[:1]):
        with suppress(ValueError):  # the look that preceded an evaluation which was cut short
            _entry(probes.path, len(looks) + 1, start, first[0], start)
            probes = _read_log(directory / PROBES, [*looks, start], start)
    return Logs(metrics, timing, probes)


class Record:
    """Appends to ``DIR/metrics.jsonl``, timing.jsonl and probes.jsonl, after the lines of the given logs.

    Attributes:
        seconds: training time so far, of the run that is resumed too.
        losses: training loss of every step so far that was not skipped.
        skipped: how many of the newest steps in a row were skipped.
        last: the metrics of the newest step.
    """

    def __init__(self, directory: Path, start: int) -> None:
        logs = read_logs(directory, start)
        for log in (logs.metrics, logs.timing, logs.probes):
            log.cut()
        kept = logs.metrics.entries
        self.losses = [line["loss"] for line in kept if not line.get("skipped")]
        self.skipped = 0  # steps in a row, up to now
        for line in kept:
            self._count(line)
        self.last: dict[str, Any] = kept[-1] if kept else {}
        self.seconds = logs.seconds
        self._metrics = logs.metrics.path.open("a", encoding="utf-8")
        self._timing = logs.timing.path.open("a", encoding="utf-8")
        self._probes = logs.probes.path.open("a", encoding="utf-8")
        self._directory = directory
        self._events = SummaryWriter(str(directory), purge_step=start + 1)

    def write(self, metrics: dict[str, Any], seconds: float) -> None:
        """One step: its metrics, and the time that it took."""
        if not metrics.get("skipped"):
            self.losses.append(metrics["loss"])
        self._count(metrics)
        self.last = metrics
        self.seconds += seconds
        step = metrics["step"]
        with _named(self._directory):
            self._metrics.write(json.dumps(finite(metrics)) + "\n")
            self._timing.write(json.dumps({"step": step, "seconds": round(self.seconds, 6)}) + "\n")
            self._plot(metrics)

    def complete(self, measured: dict[str, Any]) -> None:
        """Add an evaluation to the newest step, whose line was written without it."""
        self.last = self.last | measured
        self.flush()
        with _named(self._directory):
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
        with _named(self._directory):
            self._probes.write(json.dumps(numbers) + "\n")

    def flush(self) -> None:
        """Everything written so far reaches the disk; called before a checkpoint that counts on it."""
        with _named(self._directory):
            self._events.flush()
            for file in (self._metrics, self._timing, self._probes):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        with _named(self._directory):
            for file in (self._metrics, self._timing, self._probes, self._events):
                file.close()


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and Inf, which JSON does not have, as null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Name the folder in an OSError: TensorBoard's thread raises a full disk without the name of a file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write the logs: {error.strerror or error}", str(directory)) from error


def _read_log(path: Path, steps: Sequence[int], start: int) -> Log:
    """The lines of these steps, which must come first; ValueError where one of them is missing or damaged."""
    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    if len(lines) < len(steps):
        raise ValueError(
            f"{path} has {len(lines)} of the {len(steps)} lines before the checkpoint of step {start}; "
            "restore the file, or start in another folder"
        )
    kept = lines[: len(steps)]
    entries = [
        _entry(path, number, start, line, step) for number, (line, step) in enumerate(zip(kept, steps, strict=True), 1)
    ]
    return Log(path, entries, b"".join(kept), b"".join(lines[len(steps) :]))


def _entry(path: Path, number: int, start: int, line: bytes, step: int) -> dict[str, Any]:
    try:
        entry = parsed(line.decode())
    except ValueError as error:
        raise _damaged(path, number, start, f"not JSON ({error})") from error
    if not line.endswith(b"\n") or not isinstance(entry, dict) or entry.get("step") != step:
        raise _damaged(path, number, start, f"expected a whole line of step {step}, got {line[:60]!r}")
    return entry


def _check(
    path: Path, number: int, start: int, line: dict[str, Any], numbers: Sequence[str], nullable: Sequence[str] = ()
) -> None:
    for name in (*numbers, *nullable):
        value = line.get(name)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not real and not (name in nullable and name in line and value is None):
            got = repr(value) if name in line else "nothing"
            raise _damaged(path, number, start, f"expected a number under {name!r}, got {got}")


def _damaged(path: Path, number: int, start: int, what: str) -> ValueError:
    return ValueError(
        f"{path}, line {number}: {what}. The run cannot resume from its checkpoint of step {start} without it, and nothing "
        "was changed; restore the file, or start in another folder"
    )
