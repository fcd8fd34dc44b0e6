"""One figure with matplotlib's object-oriented interface: no pyplot, so no global state and no display."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
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
from manifold_tying.training.report._numbers import significant
from manifold_tying.training.report._palette import Look
from manifold_tying.training.report._series import Curve

INK, FAINT, PAPER = "#24292f", "#d8dee4", "#ffffff"
WIDTH, PANEL_HEIGHT, MARGINS = 5.7, 3.3, 0.7  # inches; the margins are what ticks and labels take from a panel
DOTS_PER_INCH = 200
FEW = 40  # up to so many points get a marker each
TOKEN_NUMBERS = EngFormatter(sep="\N{NARROW NO-BREAK SPACE}")
TIME_UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))  # from, size, name


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A figure, ready to be written or embedded."""

    name: str
    """The file's name, without .png."""
    title: str
    png: bytes
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


def draw(curves: Sequence[Curve], looks: Mapping[str, Look], axis: Axis) -> bytes:
    """The curves as PNG, labelled where they end; with ``zoom`` a second panel below shows how they end."""
    panels = 2 if axis.zoom else 1
    height = max(PANEL_HEIGHT, height_of(len(curves)) + MARGINS)
    figure = paper(height * panels)
    for position, axes in enumerate(figure.subplots(panels, 1, squeeze=False)[:, 0]):
        _panel(axes, curves, looks, axis, last_half=position == 1)
        label_ends(axes, curves, looks, height=height - MARGINS, ink=INK)
        _x_axis(axes, axis, named=position == panels - 1)
    return png_of(figure)


def paper(height: float) -> Figure:
    """An empty figure, as wide as all of them."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, facecolor=PAPER)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Figure) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Look], axis: Axis, *, last_half: bool) -> None:
    # half of the shortest: where arms end at different times, each still has its end in the picture
    start = min(float(line.x.max()) for line in curves) / 2 if last_half else -np.inf
    for line in curves:
        look = looks[line.arm]
        seen = line.x >= start
        axes.fill_between(line.x[seen], line.low[seen], line.high[seen], color=look.colour, alpha=0.18, linewidth=0)
        size = 3.5 if seen.sum() <= FEW else 0.0
        axes.plot(line.x[seen], line.mean[seen], **look.line, linewidth=1.5, markersize=size, markeredgewidth=0)
    axes.margins(x=0.02, y=0.06)
    if axis.log:
        axes.set_yscale("log")
        log_ticks(axes)
    axes.set_ylabel(axis.label, color=INK, fontsize=10)
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
    axes.yaxis.set_minor_formatter(NullFormatter())


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
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if axis.against == "tokens":
        axes.xaxis.set_major_formatter(TOKEN_NUMBERS)
        name = "training tokens"
    else:
        size, unit = next((size, unit) for least, size, unit in TIME_UNITS if axes.get_xlim()[1] >= least)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
        name = f"training time ({unit})"
    if named:
        axes.set_xlabel(name, color=INK, fontsize=10)


def calm(axes: Axes) -> None:
    """Two thin axes and a faint grid; the curves are what is looked at."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK, labelsize=9)
    axes.grid(color=FAINT, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
