"""Time the contenders of a row, interleaved in one process, relative to the row's reference."""

import math
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FAILED = "failed:"
Step = Callable[[], object]
Extra = dict[str, dict[str, float]]
"""Values by measure and contender."""


class Unavailable(Exception):
    """Raised by a contender's ``build`` if it cannot run here; the message gives the reason."""


class Graphed:
    """A step captured as a CUDA graph; calling it replays the kernels."""

    def __init__(self, step: Step) -> None:
        self.step = step  # whose tensors the graph reads and writes
        for _ in range(3):
            step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class Contender:
    """One implementation of a row's work; ``build`` sets it up and returns the step to time."""

    name: str
    build: Callable[[], Step]
    steps: int = 1
    """Steps per sample, for work that differs from step to step; the time is divided by them."""
    limit: float = math.inf
    """Seconds; if the first step takes longer, no other step is timed."""


@dataclass(frozen=True)
class Row:
    """Contenders that do the same work, and the name of the reference among them."""

    label: str
    reference: str
    contenders: Sequence[Contender]
    extra: Callable[[Mapping[str, Step], Mapping[str, float]], Extra] = lambda steps, milliseconds: {}
    """Computes further measures from the contenders' steps, after the timed rounds, and from their times."""
    memory_unit: tuple[str, int] | None = None
    """(name, bytes): a step's extra memory is also reported as a share of this."""
    whole_memory: bool = False
    """Whether extra memory includes what ``build`` allocates: weights, gradients and an optimizer's state."""


def measure_row(row: Row, rounds: int, warmup: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Time every contender, in the format of the result file; one that fails gets the reason instead.

    The contenders take turns in every round, so that other load on the machine affects all of them. A ratio is the median over
    rounds of a contender's time divided by the reference's time in the same round.
    """
    if row.reference not in [contender.name for contender in row.contenders]:
        raise ValueError(f"row {row.label!r} lacks its reference contender {row.reference!r}")
    steps: dict[str, Step] = {}
    absent: dict[str, str] = {}
    for contender in row.contenders:
        try:
            steps[contender.name] = contender.build()
        except Exception as error:
            absent[contender.name] = reason(error)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    once: set[str] = set()
    for turn in range(warmup + rounds):
        for contender in row.contenders:
            name = contender.name
            if name not in steps or name in once:
                continue
            try:
                seconds = _sample(steps[name], contender.steps, clock)
            except Exception as error:
                absent[name] = reason(error)
                del steps[name], samples[name]
                continue
            samples[name].append(seconds)
            if turn == 0 and seconds > contender.limit:
                once.add(name)
    kept = {name: values if name in once else values[warmup:] for name, values in samples.items()}
    milliseconds = {name: 1000 * statistics.median(values) for name, values in kept.items()}
    reference = None if row.reference in once else kept.get(row.reference)
    contenders: dict[str, Any] = {}
    for contender in row.contenders:
        name = contender.name
        if name in absent:
            contenders[name] = {"unavailable": absent[name]}
            continue
        contenders[name] = {
            "milliseconds": significant(milliseconds[name]),
            "ratio": significant(_ratio(kept[name], reference, name in once)) if reference else None,
            "rounds": len(kept[name]),
        }
        if name in once:
            contenders[name]["note"] = (
                f"a step takes longer than {contender.limit:g} s: timed once, peak memory not measured"
            )
    extra = row.extra(steps, milliseconds)
    return {"row": row.label, "reference": row.reference, "contenders": contenders, "extra": extra}


def untimed_row(row: Row) -> dict[str, Any]:
    """The result of a row without measurements, in the format of :func:`measure_row`."""
    contenders: dict[str, Any] = {contender.name: {} for contender in row.contenders}
    return {"row": row.label, "reference": row.reference, "contenders": contenders, "extra": {}}


def reason(error: Exception) -> str:
    """Why a contender has no time. The others are still measured; unexpected errors fail the run at its end."""
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory on this device"
    traceback.print_exception(error)
    return f"{FAILED} {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def significant(value: float) -> float:
    """Round to four significant digits; more would be noise."""
    return float(f"{value:.4g}")


def _sample(step: Step, times: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(times):
        step()
    return (clock() - began) / times


def _ratio(values: list[float], reference: list[float], once: bool) -> float:
    if once:  # a single sample, which cannot be paired by round
        return values[0] / statistics.median(reference)
    return statistics.median(a / b for a, b in zip(values, reference, strict=True))
