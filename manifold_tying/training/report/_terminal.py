"""The results table for a terminal: in one piece from 120 columns on, in several where there is less room."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from manifold_tying.training.report._comparison import APART, comparable, differences
from manifold_tying.training.report._experiment import Experiment
from manifold_tying.training.report._findings import findings_by_group
from manifold_tying.training.report._health import health
from manifold_tying.training.report._reading import checked_rows
from manifold_tying.training.report._results import Cell, Results, results

CAPTION = "Mean over seeds, below it ± the sample standard deviation; losses in nats per token; Δ is paired by seed."
ENDLESS = 10_000  # columns of a terminal in which everything fits


def summary_table(rows: Iterable[Mapping[str, Any]], groups: Sequence[Sequence[str]] = ()) -> Table:
    """The objects of summary.json as a table: arms in their order, the mean over seeds and below it ± the sample sd.

    ``groups`` are arms that can be measured against each other; without them all can.
    """
    content = results(checked_rows(rows, where="rows"), groups)
    return _ResultsTable(content, range(len(content.columns)))


def shown(experiment: Experiment) -> Iterator[Table | Text]:
    """What the page opens with, for a terminal: what cannot be compared, the table, the findings."""
    groups = comparable(experiment)
    if apart := differences(experiment):
        yield Text("\n- ".join([APART, *apart]), style="bold")
    yield summary_table(experiment.rows, groups)
    for sentence in (*findings_by_group(experiment.rows, groups), *health(experiment), *experiment.failures):
        yield Text(sentence)


class _ResultsTable(Table):
    """Some columns of the results. Where the terminal is too narrow the last ones go below, and no number is cut."""

    def __init__(self, content: Results, shown: Sequence[int]) -> None:
        super().__init__(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
        self._content, self._shown = content, shown
        # Text throughout: a name with brackets in it must not be taken for rich's markup
        if len(content.columns) - 1 in shown:
            self.caption = Text("\n".join([CAPTION, *content.notes]))
        self.add_column(Text("arm"), overflow="fold", max_width=16)  # the numbers are two lines high anyway
        for place in shown:
            column = content.columns[place]
            # a word a line: the numbers need the width
            heading = "\n".join([*column.heading.split(" "), column.unit]).rstrip()
            self.add_column(Text(heading), justify="right", no_wrap=True, vertical="bottom")
        for arm, cells in zip(content.arms, content.cells, strict=True):
            self.add_row(Text(arm), *(_text(cells[place]) for place in shown))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._shown), 0, -1):
            first = _ResultsTable(self._content, self._shown[:count])
            if console.measure(first, options=options.update(max_width=ENDLESS)).maximum <= options.max_width:
                break
        if count == len(self._shown) or count == 1:
            yield from super().__rich_console__(console, options)
        else:
            yield first
            yield _ResultsTable(self._content, self._shown[count:])


def _text(cell: Cell) -> Text:
    return Text(cell.mean).append(f"\n{cell.sd}", style="dim")
