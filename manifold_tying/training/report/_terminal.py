"""The results table for a terminal, within 120 columns."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ._reading import checked_rows
from ._results import Cell, results


def summary_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The objects of summary.json as a table: arms in their order, the mean over seeds and below it ± the sample sd."""
    table_of = results(checked_rows(rows, where="rows"))
    caption = (
        "Mean over seeds, below it ± the sample standard deviation; losses in nats per token; Δ is paired by seed."
    )
    # Text throughout: a name with brackets in it must not be taken for rich's markup
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=Text("\n".join([caption, *table_of.notes])),
        caption_justify="left",
    )
    table.add_column(Text("arm"), overflow="fold", min_width=13)
    for column in table_of.columns:
        # a word a line: the numbers need the width
        heading = "\n".join([*column.heading.split(" "), column.unit]).rstrip()
        table.add_column(Text(heading), justify="right", no_wrap=True, vertical="bottom")
    for arm, cells in zip(table_of.arms, table_of.cells, strict=True):
        table.add_row(Text(arm), *map(_text, cells))
    return table


def _text(cell: Cell) -> Text:
    return Text(cell.mean).append(f"\n{cell.sd}", style="dim")
