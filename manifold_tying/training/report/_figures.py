"""The section with the figures: drawings of which each arm is a group, and beside each the numbers that it shows."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from manifold_tying.training.report._curves import Plot
from manifold_tying.training.report._drawing import Drawn
from manifold_tying.training.report._markup import data_block, section, swatch
from manifold_tying.training.report._palette import Look
from manifold_tying.training.report._picture import Panel
from manifold_tying.training.report._series import Curve, Values


def figures_section(figures: Sequence[Drawn], empty: Sequence[Plot], looks: Mapping[str, Look]) -> str:
    """A box to tick per arm, which the script shows, and a section per figure."""
    boxes = "\n".join(
        f'<label><input type="checkbox" checked data-arm="{look.place}">{swatch(look)}{escape(arm)}</label>'
        for arm, look in looks.items()
    )
    choice = f'<fieldset class="arms" hidden>\n<legend>Arms shown</legend>\n{boxes}\n</fieldset>'
    shown = "\n".join(_figure(figure, looks) for figure in figures)
    missing = "; ".join(plot.title for plot in empty)
    note = f'\n<p class="note">Not drawn, since no arm has a value for it: {escape(missing)}.</p>' if empty else ""
    return section("curves", "Curves", f'{choice}\n<div class="figures">\n{shown}\n</div>{note}')


def _figure(figure: Drawn, looks: Mapping[str, Look]) -> str:
    name, picture = f"figure-{figure.name}", figure.picture
    size = f"{picture.width:g} {picture.height:g}"
    data = ""
    if picture.panels:
        data = data_block({"against": figure.against, "panels": [_panel(panel, looks) for panel in picture.panels]})
    return (
        f'<section aria-labelledby="{name}">\n<h3 id="{name}">{escape(figure.title)}</h3>\n'
        f'<figure aria-labelledby="{name}">\n<div class="plot">\n'
        f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(figure.alternative)}">{picture.svg}</svg>\n{data}</div>\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n</section>"
    )


def _panel(panel: Panel, looks: Mapping[str, Look]) -> dict[str, Any]:
    """What the script needs to put a place of the picture into numbers and back."""
    curves = [
        _curve(f"{line.arm} ({what})" if what else line.arm, line, looks[line.arm]) for what, line in panel.curves
    ]
    box = [round(part, 2) for part in panel.box]
    return {"title": panel.title, "box": box, "x": panel.x, "y": panel.y, "log": panel.log, "curves": curves}


def _curve(name: str, line: Curve, look: Look) -> dict[str, Any]:
    data = {
        "arm": look.place,
        "colour": look.variable,
        "name": name,
        "x": _rounded(line.x),
        "mean": _rounded(line.mean),
    }
    return data if line.seeds == 1 else data | {"low": _rounded(line.low), "high": _rounded(line.high)}


def _rounded(values: Values) -> list[float | None]:
    """Eight digits, more than are ever shown; null for a gap."""
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in map(float, values)]
