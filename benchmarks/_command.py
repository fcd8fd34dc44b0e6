"""Shared command of the benchmarks: options, result file and printed tables."""

import dataclasses
import gc
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._harness import FAILED, Row, measure_row, reason, significant, untimed_row
from benchmarks._memory import peak_of_step
from manifold_tying.training.files import write_atomic
from manifold_tying.training.machine import check_device, machine

ROOT = Path(__file__).resolve().parent.parent
PEERS = (
    "geoopt", "geotorch", "pogo-torch", "transformers", "liger-kernel", "peft", "poet-torch", "emerging-optimizers",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Settings of a measurement."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 20
    """Timed rounds; 0 measures only peak memory, with one contender in memory at a time."""
    warmup: int = 3
    """Untimed rounds before them."""
    rows: tuple[str, ...] = ()
    """Measure only rows whose label contains one of these texts."""
    only: tuple[str, ...] = ()
    """Measure only these contenders and each row's reference."""
    quick: bool = False
    """Use tiny sizes, to test that everything runs."""
    out: Path | None = None
    """JSON file to write after each row; keeps its rows that are not measured again."""
    resume: bool = False
    """Measure only rows that the file lacks or in which a contender failed."""

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.warmup < 0:
            raise ValueError(f"expected rounds >= 0 and warmup >= 0, got {self.rounds} and {self.warmup}")
        check_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    def autocast(self) -> torch.autocast:
        """bfloat16 if that is the dtype."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def normal(self, seed: int, *shape: int) -> torch.Tensor:
        """Standard normal entries in float32, on the device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator)


def run(
    benchmark: str,
    title: str,
    rows: Iterable[Row],
    options: Options,
    arguments: Sequence[str] | None,
    memory: bool = False,
) -> None:
    """Measure the selected rows, print a table for each and write the result; ``memory`` adds the peak of a step.

    ``rows`` is an iterator, so that each row is freed before the next one is built.
    """
    if not options.rounds and not memory:
        raise ValueError(f"expected rounds >= 1, since {benchmark} measures no memory")
    device = torch.device(options.device)
    words = ["python", "-m", f"benchmarks.{benchmark}", *(sys.argv[1:] if arguments is None else arguments)]
    origin = {"command": shlex.join(words), "commit": commit()}
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "title": title,
        "machine": {**machine(device), "peers": {name: _version(name) for name in PEERS}},
        "dtype": options.dtype,
        "rows": [],
    }
    known = _known_rows(options.out, result)
    labels: list[str] = []
    failed: list[str] = []
    selected_any = False
    for row in rows:
        labels.append(row.label)
        chosen = select(row, options)
        if chosen is None:
            continue
        row, selected_any = chosen, True
        if options.resume and row.label in known and not _failed(known[row.label]):
            continue
        if options.rounds:
            measured = measure_row(row, options.rounds, options.warmup, device_clock(device))
        else:
            measured = untimed_row(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the next row and for processes that measure memory
        if memory:
            _add_memory(benchmark, options, row, measured)
        failed += _failed(measured)
        known[row.label] = {**measured, **origin}
        _print(measured)
        if options.out is not None:
            result["rows"] = list(known.values())
            write_atomic(options.out, (json.dumps(result, indent=1) + "\n").encode())
    if not selected_any:
        raise ValueError(f"no row contains {' or '.join(options.rows)}; choose from {'; '.join(labels)}")
    if failed:
        raise RuntimeError(f"measured all contenders, but some failed: {'; '.join(failed)}")


def _failed(measured: dict[str, Any]) -> list[str]:
    return [f"{measured['row']}: {name}" for name, of in measured["contenders"].items() if FAILED in str(of)]


def select(row: Row, options: Options) -> Row | None:
    """The row with the selected contenders, None if it is not selected; ValueError for an unknown contender."""
    if options.rows and not any(text in row.label for text in options.rows):
        return None
    names = [contender.name for contender in row.contenders]
    if unknown := [name for name in options.only if name not in names]:
        raise ValueError(f"row {row.label!r} has no contender {', '.join(unknown)}; choose from {', '.join(names)}")
    chosen = [c for c in row.contenders if not options.only or c.name in options.only or c.name == row.reference]
    return dataclasses.replace(row, contenders=chosen)


def _known_rows(out: Path | None, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Existing rows of the output file by label; ValueError if its benchmark, machine or dtype differs."""
    if out is None or not out.exists():
        return {}
    before = json.loads(out.read_text(encoding="utf-8"))
    # A peer that the file does not list yet does not invalidate its rows.
    known_peers = before.get("machine", {}).get("peers", {})
    same_peers = {**result["machine"], "peers": {name: result["machine"]["peers"].get(name) for name in known_peers}}
    for key, expected in (("benchmark", result["benchmark"]), ("machine", same_peers), ("dtype", result["dtype"])):
        if before.get(key) != expected:
            raise ValueError(f"{out} has another {key}, {before.get(key)}; expected {expected}. Choose another --out")
    return {row["row"]: row for row in before["rows"]}


def _add_memory(benchmark: str, options: Options, row: Row, measured: dict[str, Any]) -> None:
    """Add the peak memory of a step of every contender that ran more than once."""
    if row.memory_unit is not None:
        measured["memory_unit"] = row.memory_unit[0]
    for name, values in measured["contenders"].items():
        if "unavailable" in values or "note" in values:  # a note means too slow to run again
            continue
        try:
            values["memory_bytes"] = peak_of_step(benchmark, options, row.label, name)
        except Exception as error:
            values["note"] = f"peak memory not measured: {reason(error)}"
            continue
        if row.memory_unit is not None:
            values["memory_share"] = significant(values["memory_bytes"] / row.memory_unit[1])


def device_clock(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that first waits for the device's queued work."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def commit() -> str | None:
    """The checked-out commit, with "-dirty" if a Python file differs from it; None outside a git checkout."""
    try:
        found = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return found + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(measured: dict[str, Any]) -> None:
    """Print a row as a table, then the contenders' notes."""
    contenders, shown = measured["contenders"], columns(measured)
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=measured["row"], title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right", min_width=6)
    for name in contenders:
        table.add_row(name, *(cells.get(name, "") for cells in shown.values()))
    console.print(table)
    for name, values in contenders.items():
        note = values.get("unavailable") or values.get("note")
        if note:
            console.print(f"{name}: {note}", markup=False, highlight=False)


def columns(measured: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Cells of a row by heading and contender."""
    contenders = measured["contenders"]
    memory = f"extra memory / {measured.get('memory_unit')}"
    shown = {
        "ms": {name: number(v["milliseconds"]) for name, v in contenders.items() if "milliseconds" in v},
        f"× {measured['reference']}": {
            name: _ratio(v["ratio"]) for name, v in contenders.items() if v.get("ratio") is not None
        },
        "extra MB": {name: f"{v['memory_bytes'] / 1e6:,.1f}" for name, v in contenders.items() if "memory_bytes" in v},
        memory: {name: f"{v['memory_share']:.3g}" for name, v in contenders.items() if "memory_share" in v},
        **{measure: {name: number(value) for name, value in of.items()} for measure, of in measured["extra"].items()},
    }
    return {heading: cells for heading, cells in shown.items() if cells}


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def number(value: float) -> str:
    """Format with readable digits: 12,345, 5.7123 or 1.04e-07."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}" if abs(value) >= 1 else f"{value:.3g}"
