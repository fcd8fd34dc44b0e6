"""A table of ours beside a paper's: text, ready to be written as Markdown or shown in a terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import rich.table
from rich import box
from rich.text import Text

from manifold_tying.training.numbers import DASH, fixed, significant, summarize


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Text cells below a title."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table, with its notes as a list below it."""
        lines = [self.head, ["---", *("---:" for _ in self.head[1:])], *self.body]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"### {self.title}\n\n{table}\n" + (f"\n{notes}" if notes else "")

    def terminal(self) -> rich.table.Table:
        """The same for a terminal."""
        table = rich.table.Table(box=box.SIMPLE_HEAD, title=Text(self.title), caption=Text("\n".join(self.notes)))
        for place, heading in enumerate(self.head):
            table.add_column(Text(heading), justify="right" if place else "left")
        for line in self.body:
            table.add_row(*map(Text, line))
        return table


def nats(values: Sequence[float], *, signed: bool = False) -> str:
    """Mean and sample standard deviation over seeds, nats per token."""
    return _with_spread(values, lambda value: fixed(value, 3, signed=signed), lambda sd: fixed(sd, 3))


def scientific(values: Sequence[float]) -> str:
    """The mean over seeds with two digits: what is compared over orders of magnitude."""
    summary = summarize(values)
    return DASH if summary is None else significant(summary.mean, 2)


def share(values: Sequence[float]) -> str:
    """Mean and sample standard deviation of shares, in per cent."""
    scaled = [100 * value for value in values]
    return _with_spread(scaled, lambda value: fixed(value, 1), lambda sd: fixed(sd, 1))


def _with_spread(values: Sequence[float], of_mean: Callable[[float], str], of_sd: Callable[[float], str]) -> str:
    summary = summarize(values)
    if summary is None:
        return DASH
    return of_mean(summary.mean) + ("" if summary.sd is None else f" ± {of_sd(summary.sd)}")


def agreement(ours: Mapping[str, float], printed: Mapping[str, float]) -> str | None:
    """How far the order of the arms is the paper's: Spearman's rank correlation over what both have; None below three."""
    both = [arm for arm in ours if arm in printed]
    if len(both) < 3:
        return None
    from scipy.stats import spearmanr  # takes longer to import than the rest of the package

    rank = spearmanr([ours[arm] for arm in both], [printed[arm] for arm in both]).statistic
    return f"Order of the arms against the paper's: Spearman's ρ = {fixed(float(rank), 2)} over {len(both)} arms."
