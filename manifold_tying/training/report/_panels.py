"""Small panels side by side, one per weight, with one key for all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from manifold_tying.training.report._drawing import FEW, MARGINS, TOKEN_NUMBERS, calm, log_ticks
from manifold_tying.training.report._labels import FONT_SIZE, LABEL_GAP, LINE_HEIGHT
from manifold_tying.training.report._palette import Look
from manifold_tying.training.report._picture import INK, Picture, paper, picture_of, plain_text
from manifold_tying.training.report._series import Curve, Values

COLUMNS, PANEL_HEIGHT = 2, 1.75  # inches


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmLines:
    """What one panel shows of one arm."""

    arm: str
    lines: Mapping[str, Curve]
    """By what they are called; the first is drawn heavier than the rest, with a marker per point."""
    band: tuple[Values, Values, Values] | None = None
    """x, low and high of a shaded area."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Linestyle to the place of an upright line."""


@plain_text
def draw_panels(
    name: str, panels: Mapping[str, Sequence[ArmLines]], looks: Mapping[str, Look], label: str, *, log: bool
) -> Picture:
    """The panels by their titles."""
    rows = math.ceil(len(panels) / COLUMNS)
    arms = list(dict.fromkeys(one.arm for panel in panels.values() for one in panel))
    figure = paper(rows * PANEL_HEIGHT + MARGINS + _key_height(arms))
    places = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).flat
    drawn = []
    for (title, panel), axes in zip(panels.items(), places, strict=False):
        for one in panel:
            _arm(axes, one, looks[one.arm])
        if log:
            axes.set_yscale("log")
            log_ticks(axes, count=3)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(TOKEN_NUMBERS)
        axes.tick_params(labelbottom=True)
        _name(axes, title)
        drawn.append((title, axes, [line for one in panel for line in one.lines.items()]))
    for axes in list(places):
        axes.set_axis_off()
    figure.supxlabel("training tokens", color=INK, fontsize=9.5)
    _key(figure, arms, looks)
    figure.supylabel(label, color=INK, fontsize=9.5)
    return picture_of(figure, name, drawn)


@plain_text
def draw_ranges(
    name: str, ranges: Mapping[str, Mapping[str, tuple[float, float, float]]], looks: Mapping[str, Look], label: str
) -> Picture:
    """(lowest, mean, highest) by weight and arm: a point per arm beside each weight's name, with a whisker."""
    arms = list(dict.fromkeys(arm for of_arms in ranges.values() for arm in of_arms))
    figure = paper(len(ranges) * (len(arms) + 1) * (LINE_HEIGHT + LABEL_GAP) + MARGINS + _key_height(arms))
    axes = figure.subplots()
    for row, of_arms in enumerate(ranges.values()):
        for arm, (low, mean, high) in of_arms.items():
            look = looks[arm]
            y = row + (arms.index(arm) - (len(arms) - 1) / 2) / (len(arms) + 1)
            axes.plot([low, high], [y, y], color=look.colour, linewidth=1.5, gid=look.group)
            axes.plot([mean], [y], **look.line, markersize=5, markeredgewidth=0)
    axes.set_yticks(range(len(ranges)), list(ranges))
    axes.invert_yaxis()
    calm(axes)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label, color=INK, fontsize=9.5)
    _key(figure, arms, looks)
    return picture_of(figure, name, [])


def _arm(axes: Axes, one: ArmLines, look: Look) -> None:
    if one.band is not None:
        axes.fill_between(*one.band, **look.band)
    for place, line in enumerate(one.lines.values()):
        if line.seeds > 1:
            axes.fill_between(line.x, line.low, line.high, **look.band)
        size = 3.0 if len(line.x) <= FEW and place == 0 else 0.0
        width = 0.8 if place else 1.4
        axes.plot(line.x, line.mean, **look.line, linewidth=width, markersize=size, markeredgewidth=0)
    for style, x in one.marks.items():
        axes.axvline(x, color=look.colour, linestyle=style, linewidth=1.0, gid=look.group)


def _name(axes: Axes, title: str) -> None:
    axes.set_title(title, color=INK, fontsize=9, loc="left")
    axes.margins(x=0.03, y=0.08)
    calm(axes)


def _key_height(arms: Sequence[str]) -> float:
    return (LINE_HEIGHT + LABEL_GAP) * len(arms)


def _key(figure: Figure, arms: Sequence[str], looks: Mapping[str, Look]) -> None:
    keys = [Line2D([], [], markersize=4, markeredgewidth=0, linewidth=1.4, **looks[arm].line) for arm in arms]
    legend = figure.legend(
        keys, arms, loc="outside upper left", frameon=False, fontsize=FONT_SIZE, labelcolor=INK, alignment="left"
    )
    for arm, handle, text in zip(arms, legend.legend_handles, legend.get_texts(), strict=True):
        for part in (handle, text):
            if part is not None:
                part.set_gid(looks[arm].group)
