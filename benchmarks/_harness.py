"""Contenders of a row take turns in one process, and each is measured against the reference of that row."""

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
"""Measure: contender: value."""


class Unavailable(Exception):
    """Raised by a contender's ``build``: it cannot run here, and the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a row; ``build`` makes whatever it needs and returns the step to be timed."""

    name: str
    build: Callable[[], Step]
    steps: int = 1
    """Steps per sample, for work that is not the same at every step; the time is divided by them."""
    limit: float = math.inf
    """Seconds: a first step that took longer is the only one."""


def no_extra(steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
    """What a row reports beside times: nothing."""
    return {}


@dataclass(frozen=True)
class Row:
    """Contenders that do the same work, and the name of the one that the others are compared with."""

    label: str
    reference: str
    contenders: Sequence[Contender]
    extra: Callable[[Mapping[str, Step], Mapping[str, float]], Extra] = no_extra
    """Further measures, from the contenders' steps after the timed rounds and from their times."""
    memory_unit: tuple[str, int] | None = None
    """What a step's extra memory is reported as a share of, and its bytes."""
    whole_memory: bool = False
    """Whether that memory counts what is built as well: weights, gradients and an optimizer's state."""


def measure_row(row: Row, rounds: int, warmup: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Times of every contender, or the reason why it has none, as they are written to the result.

    The contenders take turns round by round, so that whatever else the machine does hits all of them; a ratio is the
    median over rounds of a contender's time over the reference's time in the same round.
    """
    if row.reference not in [contender.name for contender in row.contenders]:
        raise ValueError(f"row {row.label!r} has no contender {row.reference!r} to refer to")
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
    """The result of a row before anything is measured, in the form of :func:`measure_row`."""
    contenders: dict[str, Any] = {contender.name: {} for contender in row.contenders}
    return {"row": row.label, "reference": row.reference, "contenders": contenders, "extra": {}}


def reason(error: Exception) -> str:
    """Why a contender has no time. The others are measured all the same, and a run in which one failed ends as failed."""
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory on this device"
    traceback.print_exception(error)
    return f"{FAILED} {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def significant(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _sample(step: Step, times: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(times):
        step()
    return (clock() - began) / times


def _ratio(values: list[float], reference: list[float], once: bool) -> float:
    if once:  # it has no time in any round that counts
        return values[0] / statistics.median(reference)
    return statistics.median(a / b for a, b in zip(values, reference, strict=True))
