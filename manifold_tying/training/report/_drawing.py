"""One figure with matplotlib's object-oriented interface: no pyplot, so no global state and no display."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    EngFormatter,
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from manifold_tying.training.report._labels import height_of, label_ends
from manifold_tying.training.report._numbers import SUPERSCRIPTS, significant
from manifold_tying.training.report._palette import Look
from manifold_tying.training.report._picture import FAINT, INK, Picture, paper, picture_of, plain_text
from manifold_tying.training.report._series import Curve

PANEL_HEIGHT, MARGINS = 2.85, 0.7  # inches; the margins are what ticks and labels take from a panel
FEW = 40  # up to so many points get a marker each
TOKEN_NUMBERS = EngFormatter(sep="\N{NARROW NO-BREAK SPACE}")
TIME_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))  # from, size, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A figure, ready to be written or embedded."""

    name: str
    """The file's name, without .png."""
    title: str
    picture: Picture
    against: str
    """What the x axes count: "tokens", "seconds", or "" where they are no course of training."""
    caption: str
    alternative: str
    """In words, for those who cannot see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """What the axes of a figure show."""

    label: str
    against: str
    """"tokens" or "seconds"."""
    log: bool
    zoom: bool


@plain_text
def draw(name: str, curves: Sequence[Curve], looks: Mapping[str, Look], axis: Axis) -> Picture:
    """The curves, labelled where they end; with ``zoom`` a second panel below shows how they end."""
    count = 2 if axis.zoom else 1
    height = max(PANEL_HEIGHT, height_of([line.arm for line in curves]) + MARGINS)
    figure = paper(height * count)
    panels = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    for position, axes in enumerate(panels):
        _panel(axes, curves, looks, axis, last_half=position == 1)
        label_ends(axes, curves, looks, height=height - MARGINS, ink=INK)
        _x_axis(axes, axis, named=position == count - 1)
    return picture_of(figure, name, [("", axes, [("", line) for line in curves]) for axes in panels])


def _panel(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Look], axis: Axis, *, last_half: bool) -> None:
    # half of the shortest: where arms end at different times, each still has its end in the picture
    start = min(float(line.x.max()) for line in curves) / 2 if last_half else -np.inf
    for line in curves:
        look = looks[line.arm]
        seen = line.x >= start
        axes.fill_between(line.x[seen], line.low[seen], line.high[seen], **look.band)
        size = 3.5 if seen.sum() <= FEW else 0.0
        axes.plot(line.x[seen], line.mean[seen], **look.line, linewidth=1.5, markersize=size, markeredgewidth=0)
    axes.margins(x=0.02, y=0.06)
    if axis.log:
        axes.set_yscale("log")
        log_ticks(axes)
    axes.set_ylabel(axis.label, color=INK, fontsize=9.5)
    calm(axes)
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # what is added from here on moves nothing


def log_ticks(axes: Axes, count: int = 5) -> None:
    """Powers of ten label nothing on an axis that spans less than one or two of them: there, even ticks instead."""
    low, high = axes.get_ylim()
    if high / low < 30:
        ticks = [float(tick) for tick in MaxNLocator(count).tick_values(low, high) if low <= tick <= high]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_major_formatter(FixedFormatter(tick_labels(ticks)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_of_ten(value: float) -> str:
    """10⁻⁷; "" for what is no power of ten."""
    power = math.log10(value)
    return f"10{str(round(power)).translate(SUPERSCRIPTS)}" if math.isclose(power, round(power), abs_tol=1e-9) else ""


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks with the fewest digits, from two on, that tell them apart."""
    return next(
        (
            labels
            for digits in range(2, 10)
            if len(set(labels := [significant(t, digits) for t in ticks])) == len(ticks)
        ),
        [significant(tick) for tick in ticks],
    )


def _x_axis(axes: Axes, axis: Axis, *, named: bool) -> None:
    locator = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    if axis.against == "tokens":
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(TOKEN_NUMBERS)
        name = "training tokens"
    else:
        size, unit = next((size, unit) for least, size, unit in TIME_UNITS if axes.get_xlim()[1] >= least)
        low, high = (end / size for end in axes.get_xlim())  # even numbers of the unit that is shown
        ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator([tick * size for tick in ticks]))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
        name = f"training time ({unit})"
    if named:
        axes.set_xlabel(name, color=INK, fontsize=9.5)


def calm(axes: Axes) -> None:
    """Two thin axes and a faint grid; the curves are what is looked at."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK, labelsize=9)
    axes.grid(color=FAINT, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
