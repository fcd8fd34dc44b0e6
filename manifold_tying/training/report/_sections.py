"""The sections of the page, one function each: data in, markup out, everything that comes from data escaped."""

import base64
import struct
from collections.abc import Sequence
from html import escape
from typing import Any

from manifold_tying.training.report._curves import Plot
from manifold_tying.training.report._drawing import Drawn
from manifold_tying.training.report._experiment import Experiment, Row, arm_names
from manifold_tying.training.report._findings import findings
from manifold_tying.training.report._markup import definitions, scrolling, section, table, text_of, words_of
from manifold_tying.training.report._palette import looks
from manifold_tying.training.report._results import Cell, Column, results
from manifold_tying.training.report._words import WORDS


def findings_section(rows: Sequence[Row], failures: Sequence[str] = ()) -> str:
    """What came out, in sentences, and which runs stopped before their end."""
    sentences = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in [*findings(rows), *failures])
    return section("findings", "Findings", sentences.replace(" ± ", "&nbsp;±&nbsp;"))


def results_section(rows: Sequence[Row]) -> str:
    """The results table."""
    content = results(rows)
    body = [
        f"<tr>{_arm(arm, content.arms)}{''.join(map(_cell, cells))}</tr>"
        for arm, cells in zip(content.arms, content.cells, strict=True)
    ]
    reading = (
        '<p class="note">Mean over seeds, below it ± the sample standard deviation; losses in nats per token; Δ is '
        'paired by seed. <a href="#words">The words are explained below.</a></p>\n'
    )
    notes = "".join(f'\n<p class="note">{escape(note)}</p>' for note in content.notes)
    head = ["arm", *map(_heading, content.columns)]
    return section("results", "Results", reading + table("Results by arm", head, body) + notes)


def figures_section(figures: Sequence[Drawn], empty: Sequence[Plot]) -> str:
    """A section per figure."""
    shown = "\n".join(map(_figure, figures))
    missing = "; ".join(plot.title for plot in empty)
    note = f'\n<p class="note">Not drawn, since no arm has a value for it: {escape(missing)}.</p>' if empty else ""
    return section("curves", "Curves", f'<div class="figures">\n{shown}\n</div>{note}')


def settings_section(experiment: Experiment) -> str:
    """What the arms share, and beside each other what belongs to each: learning rates first."""
    shared = definitions((words_of(key), text_of(value)) for key, value in experiment.settings.items())
    keys = list(dict.fromkeys(key for settings in experiment.arms.values() for key in settings))
    keys.sort(key=lambda key: not _is_rate(key))  # stable: otherwise in the order they were written
    of_arms = {key: [settings.get(key) for settings in experiment.arms.values()] for key in keys}
    body = [_setting(key, values) for key, values in of_arms.items() if any(value is not None for value in values)]
    head = ["setting", *map(escape, experiment.arms)]
    by_arm = table("Settings by arm", head, body)
    waiting = [arm for arm in experiment.arms if arm not in arm_names(experiment.rows)]
    note = f'\n<p class="note">Without a finished run so far: {escape(", ".join(waiting))}.</p>' if waiting else ""
    reading = '<p class="note">Learning rates first; bold where the arms differ.</p>'
    markup = f"<h3>Shared by all arms</h3>\n{shared}\n<h3>By arm</h3>\n{reading}\n{by_arm}{note}"
    return section("settings", "Settings", markup)


def machine_section(experiment: Experiment) -> str:
    """How to do it again, and what it ran on."""
    command = scrolling("Command", f"<pre><code>{escape(experiment.command)}</code></pre>")
    machine = definitions((words_of(key), text_of(value)) for key, value in experiment.machine.items())
    return section("command", "Command and machine", f"{command}\n{machine}")


def words_section() -> str:
    """Short definitions."""
    return section("words", "Words", definitions(WORDS, kind="glossary"))


def _arm(arm: str, arms: Sequence[str]) -> str:
    colour = looks(arms)[arm].colour
    swatch = f'<span class="swatch" style="background:{colour}" aria-hidden="true"></span>'
    return f'<th scope="row">{swatch}{escape(arm)}</th>'


def _heading(column: Column) -> str:
    """A word a line: the numbers need the width."""
    return "<br>".join(map(escape, column.heading.split(" "))) + (
        f"<small>{escape(column.unit)}</small>" if column.unit else ""
    )


def _cell(cell: Cell) -> str:
    return f"<td>{escape(cell.mean)}" + (f"<small>{escape(cell.sd)}</small>" if cell.sd else "") + "</td>"


def _figure(figure: Drawn) -> str:
    name = f"figure-{figure.name}"
    width, height = struct.unpack(">II", figure.png[16:24])  # the PNG's own header, so that nothing jumps while loading
    source = f"data:image/png;base64,{base64.b64encode(figure.png).decode()}"
    return (
        f'<section aria-labelledby="{name}">\n<h3 id="{name}">{escape(figure.title)}</h3>\n<figure>\n'
        f'<img width="{width}" height="{height}" alt="{escape(figure.alternative)}" src="{source}">\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n</section>"
    )


def _setting(key: str, values: Sequence[Any]) -> str:
    differs = ' class="differs"' if any(value != values[0] for value in values) else ""
    cells = "".join(f"<td>{text_of(value)}</td>" for value in values)
    return f'<tr{differs}><th scope="row">{words_of(key)}</th>{cells}</tr>'


def _is_rate(key: str) -> bool:
    return key == "lr" or key.endswith("_lr")
