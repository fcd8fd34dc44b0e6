"""A finished figure: as a file, as a part of the page, and where its panels are, so that the page can read it out."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from manifold_tying.training.report._palette import COLOURS, Look
from manifold_tying.training.report._series import Curve
from manifold_tying.training.report._svg import POINTS_PER_INCH, svg_of

INK, FAINT, PAPER = "#24292f", "#d8dee4", "#ffffff"
WIDTH = 4.9  # inches: at this size on a phone, half as large again beside another on a wide screen
DOTS_PER_INCH = 200
PAGE_COLOURS = {INK: "var(--ink)", FAINT: "var(--rule)", PAPER: "none"} | {
    colour: Look(place).variable for place, colour in enumerate(COLOURS)
}
plain_text = matplotlib.rc_context({"text.parse_math": False})  # a dollar sign in a name is a dollar sign


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes with the curves that can be read out of it."""

    title: str
    curves: Sequence[tuple[str, Curve]]
    """What a curve is called beside its arm ("" where the arm says it all), and its values."""
    box: tuple[float, float, float, float]
    """Left, top, width and height in the figure's points."""
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as PNG and as the inside of an svg element of the given size."""

    png: bytes
    svg: str
    width: float
    height: float
    panels: Sequence[Panel]


def paper(height: float) -> Figure:
    """An empty figure, as wide as all of them."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, facecolor=PAPER)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def picture_of(figure: Figure, name: str, panels: Sequence[tuple[str, Axes, Sequence[tuple[str, Curve]]]]) -> Picture:
    """The figure in both formats; ``panels`` are titles, axes and the curves in them."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    figure.set_layout_engine("none")  # it has been laid out, which takes most of the time
    svg = svg_of(figure, name, PAGE_COLOURS)
    width, height = (float(inches) * POINTS_PER_INCH for inches in figure.get_size_inches())
    return Picture(
        png=buffer.getvalue(),
        svg=svg,
        width=width,
        height=height,
        panels=[_panel(title, axes, curves, width, height) for title, axes, curves in panels],
    )


def _panel(title: str, axes: Axes, curves: Sequence[tuple[str, Curve]], width: float, height: float) -> Panel:
    place = axes.get_position()
    return Panel(
        title=title,
        curves=curves,
        box=(place.x0 * width, (1 - place.y1) * height, place.width * width, place.height * height),
        x=axes.get_xlim(),
        y=axes.get_ylim(),
        log=axes.get_yscale() == "log",
    )
