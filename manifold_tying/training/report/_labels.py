"""The arms' names at the right of a figure, where each curve ends, moved apart where they would overlap."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from manifold_tying.training.report._palette import Look
from manifold_tying.training.report._series import Curve
from manifold_tying.training.report._statistics import mean

FONT_SIZE = 9
LINE_HEIGHT, LABEL_GAP = 0.15, 0.04  # inches
LONGEST = 17  # letters in a line


def wrapped(name: str) -> str:
    """A long name on several lines, broken behind a slash and before a plus, and where that is not enough behind an equals
    sign, else anywhere."""
    parts = re.findall(r"\+?[^/+]*/?", name)
    lines = [""]
    for part in (
        piece for whole in parts for piece in (re.findall("[^=]*=?", whole) if len(whole) > LONGEST else [whole])
    ):
        if lines[-1] and len(lines[-1]) + len(part) > LONGEST:
            lines.append("")
        lines[-1] += part
    return "\n".join(line[start : start + LONGEST] for line in lines for start in range(0, len(line), LONGEST))


def label_height(names: Sequence[str]) -> float:
    """Inches from one label to the next: as much as the one with the most lines takes."""
    return LINE_HEIGHT * max((wrapped(name).count("\n") + 1 for name in names), default=1) + LABEL_GAP


def height_of(names: Sequence[str]) -> float:
    """Inches that the labels take."""
    return label_height(names) * len(names)


def label_ends(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Look], *, height: float, ink: str) -> None:
    """Write the names beside axes ``height`` inches high, each tied to its curve's last point by a dotted line."""
    ends = [_last_point(axes, line) for line in curves]
    places = spread_out([y for _, y in ends], label_height([line.arm for line in curves]) / height)
    for line, (x, y), place in zip(curves, ends, places, strict=True):
        look = looks[line.arm]
        # straight on to the edge, so that a curve which ends early is not crossed by another's tie
        dotted: dict[str, Any] = {"color": look.colour, "linewidth": 0.8, "linestyle": (0, (1, 1.5)), "gid": look.group}
        tie = Line2D([x, 1.0, 1.03], [y, y, place], **dotted)
        key = Line2D([1.03, 1.05, 1.07], [place] * 3, markevery=[1], markersize=3.5, markeredgewidth=0, **look.line)
        for artist in (tie, key):
            artist.set(transform=axes.transAxes, clip_on=False)
            axes.add_artist(artist)
        text: dict[str, Any] = {"va": "center", "color": ink, "size": FONT_SIZE, "linespacing": 1.1, "gid": look.group}
        axes.text(1.09, place, wrapped(line.arm), transform=axes.transAxes, **text)


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """The places in [0, 1] closest to the given ones (least squares) that keep their order and are a gap apart.

    Subtracting rank·gap makes this isotonic regression: neighbours in the wrong order are pooled at their mean, and
    clipping the pools keeps the optimum. Where [0, 1] is too short for all of them they go on above it.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([places[i] - rank * gap])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    highest = max(1 - (len(places) - 1) * gap, 0.0)
    levels = [min(max(mean(pool), 0.0), highest) for pool in pools for _ in pool]
    spread = {i: level + rank * gap for rank, (i, level) in enumerate(zip(order, levels, strict=True))}
    return [spread[i] for i in range(len(places))]


def _last_point(axes: Axes, line: Curve) -> tuple[float, float]:
    """Where the curve ends, in axes coordinates: its last value that is a number."""
    last = np.flatnonzero(np.isfinite(line.mean))[-1]
    shown = axes.transData.transform((line.x[last], line.mean[last]))
    x, y = axes.transAxes.inverted().transform(shown)
    # a curve that left the picture is tied to the edge where it did
    return float(np.clip(x, 0, 1)), float(np.clip(y, 0, 1))
