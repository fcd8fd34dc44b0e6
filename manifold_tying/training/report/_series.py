"""Curves over seeds: the runs of one arm to one line with a band."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manifold_tying.training.report._experiment import Run

Values = NDArray[np.float64]
TOKENS, SECONDS = "tokens", "seconds"  # what a curve is drawn against
MOST = 500  # points of a curve: more than a figure has room for, and they would only make the page large


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean, lowest and highest of one quantity over the seeds of an arm, at the steps that all its seeds have."""

    arm: str
    x: Values
    mean: Values
    low: Values
    high: Values
    seeds: int

    @property
    def last(self) -> float:
        """The mean at the last step."""
        return float(self.mean[-1])


def curve(
    runs: Sequence[Run], *, x: str, y: str, window: int = 1, positive: bool = False, most: int = MOST
) -> Curve | None:
    """The runs of one arm as a curve; None where none of them measured y against x.

    x is "tokens" or "seconds"; where seeds differ in x (they do in seconds), a step stands at its mean. ``window``
    smooths each run by a mean over the last so many values; ``positive`` leaves out what a log axis cannot show. Of more than
    ``most`` points evenly spaced ones are kept.
    """
    measured = [points for points in (_points(run, x, y) for run in runs) if points]
    shared = sorted(set.intersection(*map(set, measured))) if measured else []
    if not shared:
        return None
    table = np.array([[points[step] for step in shared] for points in measured], dtype=float)  # (seeds, steps, 2)
    places, values = table[..., 0].mean(axis=0), table[..., 1]
    values[~np.isfinite(values) | (positive & (values <= 0))] = np.nan  # drawn as a gap
    values = np.stack([trailing_mean(row, window) for row in values])
    if np.isnan(values).all():
        return None
    kept = np.unique(np.linspace(0, len(shared) - 1, min(len(shared), most)).round().astype(int))  # first and last too
    places, values = places[kept], values[:, kept]
    return Curve(runs[0].arm, places, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(measured))


def of_seeds(curves: Sequence[Curve]) -> str:
    """What line and band of these curves are, as a sentence."""
    seeds = sorted({line.seeds for line in curves})
    if seeds == [1]:
        return "One seed, so there is no band."
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"Lines are means over {count} seeds, bands reach from the lowest to the highest seed."


def trailing_mean(values: Values, window: int) -> Values:
    """The mean of each value and the window - 1 before it; of all so far where there are fewer. Never looks ahead."""
    smoothed = np.empty_like(values)
    for end in range(1, len(values) + 1):
        smoothed[end - 1] = values[max(end - window, 0) : end].mean()
    return smoothed


def smoothing_window(runs: Sequence[Run]) -> int:
    """A fortieth of the longest run: short enough to follow the curve, long enough to see it."""
    return max((len(run.metrics) // 40 for run in runs), default=1) or 1


def _points(run: Run, x: str, y: str) -> dict[int, tuple[float, float]]:
    """(x, y) by step, wherever both were measured."""
    points = {}
    for line in run.metrics:
        place = run.seconds.get(line["step"]) if x == SECONDS else line.get(x)
        if place is not None and line.get(y) is not None:
            points[line["step"]] = (place, line[y])
    return points
