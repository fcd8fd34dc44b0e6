"""The sections of the page, one function each: data in, markup out, everything that comes from data escaped."""

from collections.abc import Sequence
from html import escape
from typing import Any

from manifold_tying.training.report._comparison import APART, differences
from manifold_tying.training.report._experiment import Experiment, Row, arm_names
from manifold_tying.training.report._findings import findings_by_group
from manifold_tying.training.report._health import health
from manifold_tying.training.report._markup import (
    definitions,
    number_attribute,
    scrolling,
    section,
    swatch,
    table,
    text_of,
    words_of,
)
from manifold_tying.training.report._palette import looks
from manifold_tying.training.report._results import Cell, Column, results
from manifold_tying.training.report._words import WORDS

NO_COMMAND = (
    "The command was not recorded, as the first versions of <code>train</code> did not; its settings are above."
)


def findings_section(experiment: Experiment, groups: Sequence[Sequence[str]]) -> str:
    """What came out, in sentences, which runs stopped before their end, and first of all what cannot be compared."""
    apart = differences(experiment)
    warning = ""
    if apart:
        listed = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in apart)
        warning = f'<div class="warning">\n<p><strong>{APART}</strong></p>\n<ul>\n{listed}\n</ul>\n</div>\n'
    sentences = [*findings_by_group(experiment.rows, groups), *health(experiment), *experiment.failures]
    paragraphs = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return warning + section("findings", "Findings", paragraphs.replace(" ± ", "&nbsp;±&nbsp;"))


def results_section(rows: Sequence[Row], groups: Sequence[Sequence[str]]) -> str:
    """The results table."""
    content = results(rows, groups)
    of_arm = looks(content.arms)
    body = [
        f'<tr class="arm {of_arm[arm].group}"><th scope="row">{swatch(of_arm[arm])}{escape(arm)}</th>'
        f"{''.join(map(_cell, cells))}</tr>"
        for arm, cells in zip(content.arms, content.cells, strict=True)
    ]
    reading = (
        '<p class="note">Mean over seeds, below it ± the sample standard deviation; losses in nats per token; Δ is '
        'paired by seed. <a href="#words">The words are explained below.</a></p>\n'
    )
    notes = "".join(f'\n<p class="note">{escape(note)}</p>' for note in content.notes)
    head = ["arm", *map(_heading, content.columns)]
    return section("results", "Results", reading + table("Results by arm", head, body) + notes)


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
    parts = []
    for source in experiment.sources:
        if len(experiment.sources) > 1:
            parts.append(f"<h3>{escape(source.name)}</h3>")
        if source.command:
            code = f"<pre><code>{escape(source.command)}</code></pre>"
            parts.append(scrolling(f"Command of {source.name}", code))
        else:
            parts.append(f'<p class="note">{NO_COMMAND}</p>')
        parts.append(definitions((words_of(key), text_of(value)) for key, value in source.machine.items()))
    return section("command", "Command and machine", "\n".join(parts))


def words_section() -> str:
    """Short definitions."""
    return section("words", "Words", definitions(WORDS, kind="glossary"))


def _heading(column: Column) -> str:
    """A word a line: the numbers need the width."""
    return "<br>".join(map(escape, column.heading.split(" "))) + (
        f"<small>{escape(column.unit)}</small>" if column.unit else ""
    )


def _cell(cell: Cell) -> str:
    return (
        f"<td{number_attribute(cell.value)}>{escape(cell.mean)}"
        + (f"<small>{escape(cell.sd)}</small>" if cell.sd else "")
        + "</td>"
    )


def _setting(key: str, values: Sequence[Any]) -> str:
    differs = ' class="differs"' if any(value != values[0] for value in values) else ""
    cells = "".join(f"<td{number_attribute(value)}>{text_of(value)}</td>" for value in values)
    return f'<tr{differs}><th scope="row">{words_of(key)}</th>{cells}</tr>'


def _is_rate(key: str) -> bool:
    return key == "lr" or key.endswith("_lr")
