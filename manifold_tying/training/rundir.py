"""The folder of a run: settings, logs (one JSON object per line), TensorBoard events and the result.

Times are in a separate file, so that a resumed run writes the same metrics as an uninterrupted one.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from manifold_tying._json import parsed, read_bytes
from manifold_tying.training.checkpoint import advice, checkpoints, set_aside, set_newer_aside
from manifold_tying.training.config import ARM, CORPUS, TrainConfig
from manifold_tying.training.files import Damaged, check_writable, read_own, write_atomic, writing_to
from manifold_tying.training.hf_model import OUT, HuggingFaceModel, Model
from manifold_tying.training.machine import called_as, check_device, machine, peak_memory
from manifold_tying.training.processes import Processes

CONFIG, RESULT = "config.json", "result.json"
EXPERIMENT = "experiment.json"  # in the folder of an ablation
ORIGIN = "run.json"  # not in config.json: a resumed run may have another command and machine
TOKENIZER = "tokenizer.json"  # for sample, which must not need the corpus
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
PROBES = "probes.jsonl"  # written before the first step and at every evaluation


@dataclass(frozen=True)
class Log:
    """A log, split at a checkpoint: ``kept`` lines, which are parsed to ``entries``, and the ``rest``."""

    path: Path
    entries: list[dict[str, Any]]
    kept: bytes
    rest: bytes


def open_folder(
    config: TrainConfig, arm: str, identity: dict[str, Any], processes: Processes, load: Callable[[Path], int]
) -> "tuple[int, Record | None]":
    """Create the run's folder, or ``load`` its newest intact checkpoint. Returns the step and, on rank 0, the logs.

    Newer and damaged checkpoints are renamed to aside-*.
    """
    found = None
    start, damaged = 0, {}
    for path in processes.from_main(lambda: _candidates(config)):
        try:
            start, found = load(path), path
            break
        except Damaged as error:
            if config.resume_from is not None:
                raise
            damaged[path] = str(error).removesuffix(advice(path))
    logs = processes.raise_together(lambda: read_logs(config.out, start) if processes.is_main else [])

    def write() -> None:
        with writing_to(config.out):
            result = config.out / RESULT
            if start < config.settings.steps and result.exists():  # from a run that went further
                os.replace(result, result.with_name(f"aside-{RESULT}"))
            for path, what in damaged.items():
                where = found.name if found else "the start"
                print(f"{what}Renamed to {set_aside(path).name}; continuing from {where}")
            if found is not None:
                set_newer_aside(found)
            write_atomic(config.out / CONFIG, json.dumps({ARM: arm, **identity}, indent=1).encode())
            device = torch.device(config.settings.device)
            origin = {"command": called_as("train") or config.command(), "machine": machine(device)}
            write_atomic(config.out / ORIGIN, json.dumps(origin, indent=1).encode())

    processes.on_main(write)
    return start, processes.raise_together(lambda: Record(config.out, logs, start) if processes.is_main else None)


def check_out(config: TrainConfig) -> None:
    """Raises ValueError if the folder cannot take the run; cheap, so that a corpus is not prepared in vain."""
    check_writable(config.out)
    _candidates(config)
    check_alone(config.out, config.out / EXPERIMENT)


def check_alone(out: Path, *others: Path) -> None:
    """Raises ValueError if one of the files exists, or a budget's folder: a report of both would leave one out."""
    if held := [path for path in (*others, *out.glob(f"tokens-*/{EXPERIMENT}")) if path.exists()]:
        raise ValueError(f"{out} already belongs to other results, those of {held[0]}; choose another --out")


def _candidates(config: TrainConfig) -> list[Path]:
    """Checkpoints to resume from, newest first.

    Raises ValueError if the folder holds a config.json of something else, or a run and ``resume`` is off.
    """
    read_own(config.out / CONFIG, ("interface", "seed"))
    saved = checkpoints(config.out)
    if (name := config.resume_from) is not None:
        if not (chosen := [path for path in saved if path.name == name]):
            listed = ", ".join(path.name for path in saved) or "none"
            raise ValueError(f"{config.out} has no checkpoint {name!r}; available: {listed}")
        return chosen
    if not config.resume and (saved or (config.out / METRICS).exists()):
        raise ValueError(f"{config.out} already holds a run; continue it with --resume, or choose another --out")
    return saved[::-1]


def read_logs(directory: Path, start: int) -> list[Log]:
    """Read and check metrics, timing and probes up to the checkpoint of step ``start``.

    Raises ValueError if a line up to the checkpoint is missing or damaged. The newest step may lack its evaluation if a
    signal interrupted it.
    """
    metrics = _read_log(directory / METRICS, range(1, start + 1), start)
    timing = _read_log(directory / TIMING, range(1, start + 1), start)
    probed = [0] if start else []
    probed += [line["step"] for line in metrics.entries if "val_loss" in line]
    probes = _read_log(directory / PROBES, probed, start)
    if start and start not in probed and (first := probes.rest.splitlines(keepends=True)[:1]):
        with suppress(ValueError):  # from an interrupted evaluation
            _entry(probes.path, len(probed) + 1, start, first[0], start)
            probes = _read_log(directory / PROBES, [*probed, start], start)
    return [metrics, timing, probes]


class Record:
    """Appends to the logs of a run and to its TensorBoard events; moves what follows the checkpoint to aside-NAME."""

    def __init__(self, directory: Path, logs: list[Log], start: int) -> None:
        for log in (log for log in logs if log.rest):
            with log.path.with_name(f"aside-{log.path.name}").open("ab") as aside:
                aside.write(log.rest.removesuffix(b"\n") + b"\n")
            write_atomic(log.path, log.kept)
        metrics, timing, _ = (log.entries for log in logs)
        self.losses = [line["loss"] for line in metrics if not line.get("skipped")]  # without skipped steps
        taken = [line["step"] for line in metrics if not line.get("skipped")]
        self.skipped = start - (taken[-1] if taken else 0)  # steps in a row before the resume
        self.last: dict[str, Any] = metrics[-1] if metrics else {}  # of the newest step
        self.seconds: float = timing[-1]["seconds"] if timing else 0.0  # of training, including before a resume
        self._directory = directory
        self._metrics, self._timing, self._probes = (log.path.open("a", encoding="utf-8") for log in logs)
        self._events = SummaryWriter(str(directory), purge_step=start + 1)

    def write(self, metrics: dict[str, Any], seconds: float) -> None:
        if not metrics.get("skipped"):
            self.losses.append(metrics["loss"])
        self.last = metrics
        self.seconds += seconds
        with _named(self._directory):
            self._metrics.write(json.dumps(finite(metrics)) + "\n")
            self._timing.write(json.dumps({"step": metrics["step"], "seconds": round(self.seconds, 6)}) + "\n")
            self._plot(metrics)

    def complete(self, measured: dict[str, Any]) -> None:
        """Add an evaluation to the newest step's line."""
        self.last = self.last | measured
        self.flush()
        with _named(self._directory):
            self._metrics.close()
            path = Path(self._metrics.name)
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
            write_atomic(path, "".join([*lines, json.dumps(finite(self.last)) + "\n"]).encode())
            self._metrics = path.open("a", encoding="utf-8")
            self._plot({"step": self.last["step"], **measured})

    def _plot(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name not in ("step", "skipped") and value is not None:
                self._events.add_scalar(name, value, metrics["step"])

    def write_probes(self, step: int, tokens: int, weights: dict[str, Any]) -> None:
        with _named(self._directory):
            self._probes.write(json.dumps({"step": step, "tokens": tokens, "weights": weights}) + "\n")

    def flush(self) -> None:
        """fsync the logs; a checkpoint relies on them."""
        with _named(self._directory):
            self._events.flush()
            for file in (self._metrics, self._timing, self._probes):
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        with _named(self._directory):
            for file in (self._metrics, self._timing, self._probes, self._events):
                file.close()


def write_row(
    config: TrainConfig, arm: str, identity: dict[str, Any], model: Model, record: Record | None
) -> dict[str, Any]:
    """Write ``OUT/result.json``, and with ``init_from`` the model. Returns the row."""
    assert record is not None, "rank 0 has a record"
    settings, last = config.settings, record.last
    losses = record.losses[-max(1, settings.steps // 10) :]
    row = {
        "arm": arm,
        "seed": config.seed,
        "val_loss": last["val_loss"],
        "train_loss": sum(losses) / len(losses) if losses else math.nan,
        "tokens": settings.steps * settings.tokens_per_step,
        "seconds": record.seconds,
        "tokens_per_second": settings.steps * settings.tokens_per_step / record.seconds,
        "peak_memory_bytes": peak_memory(check_device(settings.device)),
        **{name: last[name] for name in ("defect", "delta_ti", "cond_transform", "orthogonality_error")},
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        **{name: identity[CORPUS][name] for name in ("evaluated_tokens", "held_out_sha256")},
    }
    if isinstance(model, HuggingFaceModel) and settings.init_from is not None:
        model.write(config.out / OUT, settings.init_from)
    write_atomic(config.out / RESULT, json.dumps(finite(row), indent=1).encode())
    return row


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and Inf as None, since JSON lacks them."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Name the folder in an OSError; TensorBoard's thread raises it without a file name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write the logs: {error.strerror or error}", str(directory)) from error


def _read_log(path: Path, steps: Sequence[int], start: int) -> Log:
    """Split a log after the lines of these steps; raises ValueError if one is missing or damaged."""
    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    if len(lines) < len(steps):
        raise ValueError(
            f"{path} has {len(lines)} of the {len(steps)} lines before the checkpoint of step {start}; "
            "restore the file, or start in another folder"
        )
    kept, rest = lines[: len(steps)], lines[len(steps) :]
    entries = [_entry(path, i, start, line, step) for i, (line, step) in enumerate(zip(kept, steps, strict=True), 1)]
    return Log(path, entries, b"".join(kept), b"".join(rest))


def _entry(path: Path, number: int, start: int, line: bytes, step: int) -> dict[str, Any]:
    entry, what = None, f"expected a complete line of step {step}, got {line[:60]!r}"
    try:
        entry = parsed(line.decode())
    except ValueError as error:
        what = f"not JSON ({error})"
    if not line.endswith(b"\n") or not isinstance(entry, dict) or entry.get("step") != step:
        raise ValueError(
            f"{path}, line {number}: {what}. The run cannot resume from its checkpoint of step {start} without this line. "
            "Nothing was changed; restore the file, or start in another folder"
        )
    return entry
