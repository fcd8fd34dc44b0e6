"""Tables for the page, the terminal, CSV and LaTeX."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from manifold_tying.training import numbers
from manifold_tying.training.numbers import DASH, Summary, fixed, significant, summarize
from manifold_tying.training.report.comparison import APART, comparable, differences
from manifold_tying.training.report.findings import all_findings
from manifold_tying.training.report.load import (
    BASELINES,
    Experiment,
    Row,
    arm_names,
    baseline_of,
    by_seed,
    checked_rows,
    interface_of,
)

CAPTION = "Mean over seeds, with ± the sample standard deviation below; losses in nats per token; Δ is paired by seed."
TEX = {"−": "$-$", "±": r"$\pm$", "Δ": r"$\Delta$", DASH: "--", "\N{NO-BREAK SPACE}": " ", "∞": r"$\infty$"}
POWER, PLAIN = re.compile("×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)"), str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
Texts = Callable[[Summary], tuple[str, str]]  # formats a mean and its spread


@dataclass(frozen=True, slots=True)
class Cell:
    """A mean over seeds and its spread, as text and as numbers for sorting and export; "" and None if missing."""

    text: str
    sd: str = ""
    value: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a label and one cell per column; ``columns`` are pairs of heading and unit."""

    label: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str] = ()

    @property
    def _names(self) -> list[str]:
        return [name.replace("\N{NO-BREAK SPACE}", " ") + f" ({unit})" * bool(unit) for name, unit in self.columns]

    def csv(self) -> str:
        """CSV with all digits and a column for each spread."""
        table: dict[str, list[Any]] = {self.label: [label for label, _ in self.rows]}
        for place, name in enumerate(self._names):
            cells = [cells[place] for _, cells in self.rows]
            table[name] = [cell.text if cell.value is None else cell.value for cell in cells]
            if any(cell.spread is not None for cell in cells):
                table[f"{name}, sd"] = [cell.spread for cell in cells]
        return str(pd.DataFrame(table).replace(DASH, None).to_csv(index=False))

    def latex(self) -> str:
        """LaTeX tabular with the digits of the page."""
        rows = [[label, *(f"{cell.text} {cell.sd}".strip() for cell in cells)] for label, cells in self.rows]
        text = pd.DataFrame(rows, columns=[self.label, *self._names]).to_latex(index=False, escape=True)
        text = POWER.sub(lambda found: rf"$\times10^{{{found[1].translate(PLAIN)}}}$", text)
        return "".join(TEX.get(letter, letter) for letter in text)


def results(rows: Sequence[Row], groups: Sequence[Sequence[str]] = ()) -> Table:
    """Mean ± sample standard deviation over seeds for every arm; ``groups`` are comparable arms, all by default."""
    arms = arm_names(rows)
    reference = interface_of(baseline_of(arms) or BASELINES[0])
    baselines = {
        arm: baseline_of([other for other in group if interface_of(other) == reference])
        for group in groups or [arms]
        for arm in group
    }

    def column(quantity: str, texts: Texts, size: float = 1) -> list[Cell]:
        of_arms = [[value / size for value in by_seed(rows, arm, quantity).values()] for arm in arms]
        return [_cell(summarize(values), texts) for values in of_arms]

    def unit(quantity: str, *units: tuple[float, str]) -> tuple[float, str]:
        largest = max((row[quantity] for row in rows if row[quantity] is not None), default=0)
        return next((unit for unit in units if largest >= unit[0]), units[-1])

    memory, memory_unit = unit("peak_memory_bytes", (2.0**30, "GiB"), (2.0**20, "MiB"))
    count, count_unit = unit("trainable_parameters", (1e6, "million"), (1e3, "thousand"))
    seeds = [sum(row["arm"] == arm for row in rows) for arm in arms]
    perplexities = column("val_loss", lambda loss: (numbers.perplexity(loss), ""))
    trainable = column("trainable_parameters", lambda s: (fixed(s.mean, 2), ""), count)  # the same for every seed
    columns = {
        ("seeds", ""): [Cell(str(n), value=n) for n in seeds],
        ("val loss", "nats"): column("val_loss", numbers.interval),
        ("perplexity", ""): [
            replace(cell, value=math.exp(min(cell.value or 0, 700)), spread=None) for cell in perplexities
        ],
        (f"Δ\N{NO-BREAK SPACE}to {reference}", "nats"): [_difference(rows, arm, baselines[arm]) for arm in arms],
        ("train loss", "nats"): column("train_loss", numbers.interval),
        ("speed", "tokens/s"): column("tokens_per_second", _rounded(0)),
        ("peak memory", memory_unit): column("peak_memory_bytes", _rounded(2), memory),
        ("defect", ""): column("defect", _digits(2)),
        ("ΔTI", ""): column("delta_ti", _digits(2)),
        ("cond(T)", ""): column("cond_transform", _digits(3)),
        ("e_orth", ""): column("orthogonality_error", _digits(2)),
        ("trainable", count_unit): [replace(cell, spread=None) for cell in trainable],
    }
    if all(row["orthogonality_error"] is None for row in rows):
        del columns["e_orth", ""]
    cells = zip(*columns.values(), strict=True)
    return Table("arm", [*columns], [*zip(arms, cells, strict=True)], _notes(rows, arms, baselines))


def _cell(summary: Summary | None, texts: Texts) -> Cell:
    """A summary as text; a dash for a missing value or the spread of a single seed."""
    if summary is None:
        return Cell(DASH)
    text, sd = texts(summary)
    return Cell(text, f"± {sd}" if sd and summary.sd is not None else sd, summary.mean, summary.sd)


def _rounded(decimals: int) -> Texts:
    return lambda s: (fixed(s.mean, decimals), DASH if s.sd is None else fixed(s.sd, decimals))


def _digits(count: int) -> Texts:
    return lambda s: (significant(s.mean, count), DASH if s.sd is None else significant(s.sd, count, like=s.mean))


def _difference(rows: Sequence[Row], arm: str, baseline: str | None) -> Cell:
    if baseline is None or arm == baseline:
        return Cell(DASH) if baseline is None else Cell("reference", value=0.0)
    paired = numbers.paired_differences(*(by_seed(rows, one, "val_loss") for one in (arm, baseline)))
    return _cell(summarize(paired), lambda summary: numbers.interval(summary, signed=True))


def _notes(rows: Sequence[Row], arms: Sequence[str], baselines: Mapping[str, str | None]) -> list[str]:
    notes = []
    if not any(baselines.values()):
        notes.append(f"There is no {BASELINES[0]} arm in this experiment, so the table has no difference to it.")
    seeds = {arm: ", ".join(map(str, sorted(row["seed"] for row in rows if row["arm"] == arm))) for arm in arms}
    if len({*seeds.values()}) > 1:
        listed = "; ".join(f"{arm}: {of}" for arm, of in seeds.items())
        notes.append(
            f"The arms were run with different seeds ({listed}), so compare them by the paired difference, which uses only "
            "the seeds that both arms have."
        )
    return notes


def summary_table(rows: Iterable[Mapping[str, Any]], groups: Sequence[Sequence[str]] = ()) -> RichTable:
    """The results as a rich table; ``groups`` are comparable arms, all by default."""
    content = results(checked_rows(rows, where="rows"), groups)
    # No perplexity, to save space: the findings state the lowest.
    return _Printed(content, [place for place, (heading, _) in enumerate(content.columns) if heading != "perplexity"])


def shown(experiment: Experiment) -> Iterator[RichTable | Text]:
    """The terminal's output: what makes losses incomparable, the table and the findings."""
    groups = comparable(experiment)
    if apart := differences(experiment):
        yield Text("\n- ".join([APART, *apart]), style="bold")
    yield summary_table(experiment.rows, groups)
    yield from map(Text, all_findings(experiment, groups))


class _Printed(RichTable):
    """Some columns of the results; in a narrow terminal the last ones go to a second table."""

    def __init__(self, content: Table, places: Sequence[int]) -> None:
        super().__init__(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
        self._content, self._places = content, places
        # Text throughout: rich would read brackets in a name as markup.
        if len(content.columns) - 1 in places:
            self.caption = Text("\n".join([CAPTION, *content.notes]))
        self.add_column(Text("arm"), overflow="fold", max_width=16)  # the numbers take two lines anyway
        for heading, unit in (content.columns[place] for place in places):
            words = "\n".join([*heading.split(" "), unit]).rstrip()  # one word per line, to save width
            self.add_column(Text(words), justify="right", no_wrap=True, vertical="bottom")
        for arm, cells in content.rows:
            self.add_row(Text(arm), *(Text(cells[i].text).append(f"\n{cells[i].sd}", style="dim") for i in places))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._places), 0, -1):
            first = _Printed(self._content, self._places[:count])
            if console.measure(first, options=options.update(max_width=10_000)).maximum <= options.max_width:
                break
        if count in (1, len(self._places)):
            yield from super().__rich_console__(console, options)
        else:
            yield from (first, _Printed(self._content, self._places[count:]))
