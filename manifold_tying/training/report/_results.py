"""The results table as text: one line per arm, one column per quantity. The terminal and the page only dress it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from manifold_tying.training.report._experiment import (
    BASELINES,
    Quantity,
    Row,
    arm_names,
    baseline_of,
    by_seed,
    interface_of,
    seeds_of,
)
from manifold_tying.training.report._numbers import COUNT_UNITS, DASH, MEMORY_UNITS, fixed, scale, significant
from manifold_tying.training.report._statistics import Summary, paired_differences, summarize

Text = Callable[[float, float], str]  # a value, and the mean that it stands beside, as text


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and the unit below it."""

    heading: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """The mean over seeds, and the standard deviation that is set below it ("" where it makes no sense)."""

    mean: str
    sd: str = ""
    value: float | None = None
    """The mean as a number, to sort by."""


@dataclass(frozen=True, slots=True)
class Results:
    """``cells[i][j]``: arm i, column j."""

    arms: Sequence[str]
    columns: Sequence[Column]
    cells: Sequence[Sequence[Cell]]
    notes: Sequence[str]


def results(rows: Sequence[Row], groups: Sequence[Sequence[str]] = ()) -> Results:
    """Mean ± sample standard deviation over seeds for every arm, in the order of the rows.

    ``groups`` are arms that can be measured against each other; without them all can.
    """
    arms = arm_names(rows)
    baselines = {arm: baseline_of(group) for group in groups or [arms] for arm in group}
    named = [interface_of(baseline) for baseline in baselines.values() if baseline]

    def largest(quantity: Quantity) -> float:
        return max((value for arm in arms for value in by_seed(rows, arm, quantity).values()), default=0.0)

    memory_size, memory_unit = scale(largest("peak_memory_bytes"), MEMORY_UNITS)
    count_size, count_unit = scale(largest("trainable_parameters"), COUNT_UNITS)

    def column(quantity: Quantity, text: Text) -> list[Cell]:
        return [_cell(summarize(list(by_seed(rows, arm, quantity).values())), text) for arm in arms]

    rotations: dict[Column, list[Cell]] = {}
    if any(row["orthogonality_error"] is not None for row in rows):
        rotations[Column("e_orth")] = column(
            "orthogonality_error", lambda value, mean: significant(value, 2, like=mean)
        )
    columns = {
        Column("seeds"): [Cell(str(count), value=count) for count in (len(seeds_of(rows, arm)) for arm in arms)],
        Column("val loss", "nats"): column("val_loss", _nats),
        Column("Δ\N{NO-BREAK SPACE}to " + next(iter(named), BASELINES[0]), "nats"): [
            _difference(rows, arm, baselines[arm]) for arm in arms
        ],
        Column("train loss", "nats"): column("train_loss", _nats),
        Column("speed", "tokens/s"): column("tokens_per_second", lambda value, _: fixed(value)),
        Column("peak memory", memory_unit): column("peak_memory_bytes", lambda value, _: fixed(value / memory_size, 2)),
        Column("defect"): column("defect", lambda value, mean: significant(value, 2, like=mean)),
        Column("ΔTI"): column("delta_ti", lambda value, mean: significant(value, 2, like=mean)),
        Column("cond(T)"): column("cond_transform", lambda value, mean: significant(value, 3, like=mean)),
        **rotations,
        Column("trainable", count_unit): [
            # a count: the same for every seed
            Cell(one.mean, value=one.value)
            for one in column("trainable_parameters", lambda value, _: fixed(value / count_size, 2))
        ],
    }
    return Results(arms, list(columns), list(zip(*columns.values(), strict=True)), _notes(rows, arms, baselines))


def _cell(summary: Summary | None, text: Text) -> Cell:
    """A summary as text; a dash for what was not measured, and for the spread of a single seed."""
    if summary is None:
        return Cell(DASH)
    spread = DASH if summary.sd is None else "± " + text(summary.sd, summary.mean)
    return Cell(text(summary.mean, summary.mean), spread, summary.mean)


def _nats(value: float, mean: float) -> str:
    return fixed(value, 4)


def _difference(rows: Sequence[Row], arm: str, baseline: str | None) -> Cell:
    if baseline is None:
        return Cell(DASH)
    if arm == baseline:
        return Cell("reference", value=0.0)
    summary = summarize(paired_differences(by_seed(rows, arm, "val_loss"), by_seed(rows, baseline, "val_loss")))
    if summary is None:
        return Cell(DASH)
    return Cell(fixed(summary.mean, 4, signed=True), _cell(summary, _nats).sd, summary.mean)


def _notes(rows: Sequence[Row], arms: Sequence[str], baselines: Mapping[str, str | None]) -> list[str]:
    """What a reader must know before comparing two lines of the table."""
    notes = []
    if not any(baselines.values()):
        notes.append(f"There is no {BASELINES[0]} arm in this experiment, so there is no difference to it.")
    if len({tuple(seeds_of(rows, arm)) for arm in arms}) > 1:
        listed = "; ".join(f"{arm}: {', '.join(map(str, seeds_of(rows, arm)))}" for arm in arms)
        notes.append(
            f"The arms were run with different seeds ({listed}), so compare them by the paired difference, which takes "
            "only the seeds that both arms have."
        )
    return notes
