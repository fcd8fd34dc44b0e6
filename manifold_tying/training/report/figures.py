"""Figures: curves over seeds as data frames, drawn by plotly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from manifold_tying.training.numbers import significant
from manifold_tying.training.report.load import Experiment, arm_names
from manifold_tying.training.report.tables import Cell, Table

# Okabe and Ito's palette without its yellow, too pale for a line; from the eighth arm on, lines are also dashed
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
DASHES = ("solid", "dash", "dot")
MOST, LISTED = 250, 20  # points of a curve in the figure, and in its table
LINE = ["arm", "weight", "quantity"]  # identify a curve of a figure
NUMBERS = ["x", "mean", "low", "high"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity ``y`` of all arms against ``x``, per run or per probed weight."""

    name: str
    title: str
    y: str
    label: str
    reading: str
    x: str = "tokens"
    log: bool = False
    smooth: bool = False
    weights: bool = False
    thin: Mapping[str, str] = field(default_factory=dict)
    """Further quantities, drawn as thin lines, with their names."""
    band: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The two quantities that bound a quantity's band, instead of the range over seeds."""


def _turning(side: str, rows: str) -> Figure:
    reading = (
        f"{side}, the product over all merges, turns the {rows} of W0. Heavy line: the cosine between a fixed random v and "
        f"{side} v, which is 1 at the identity. Thin line: its mean over random v, tr {side} / m ± 2 standard deviations."
    )
    thin, band = {f"{side}.trace": f"tr {side} / m"}, {f"{side}.trace": (f"{side}.low", f"{side}.high")}
    title, label = f"How far {side} has turned", f"v⊤{side} v / v⊤v"
    return Figure(f"turning-{side}", title, f"{side}.vector", label, reading, weights=True, thin=thin, band=band)


FIGURES = (
    Figure("val-loss-tokens", "Validation loss against tokens", "val_loss", "nats per token",
           "Equal data: which arm learns most from the same tokens. Drag to zoom in, double-click to zoom out."),
    Figure("val-loss-seconds", "Validation loss against time", "val_loss", "nats per token",
           "Equal time: the same losses, including the cost of each arm's steps.", x="seconds"),
    Figure("train-loss-tokens", "Training loss", "loss", "nats per token",
           "The loss of each training batch before its update.", smooth=True),
    Figure("defect", "Defect", "defect", "‖Z⊤Z − I‖ / √d",
           "How far the memory is off the Stiefel manifold; float32 rounding alone gives about 10⁻⁷.", log=True),
    Figure("delta-ti", "Interface consistency ΔTI", "delta_ti", "‖Wₒᵤₜ E − I‖",
           "How far the unembedding is from an inverse of the embedding.", log=True),
    Figure("cond-transform", "Condition number of the transform", "cond_transform", "cond(T)",
           "Longest axis of the transform divided by the shortest: 1 for a multiple of the identity.", log=True),
)  # fmt: skip
POET = (
    Figure("orthogonality-error", "Orthogonality error of POET's rotations", "orthogonality_error", "e_orth, ‖RR⊤ − I‖ / √m",
           "How far R and P are from orthogonal: the maximum over all weights since the previous evaluation. It grows between "
           "merges; each merge resets R and P to the identity.", log=True),
    Figure("singular-values", "Singular values", "singular_values.max", "singular values of W",
           "POET keeps those of W0, up to the error of its rotations; AdamW lets the large ones grow. Heavy line: the largest; "
           "thin lines: the median and the smallest.", log=True, weights=True,
           thin={"singular_values.median": "median", "singular_values.min": "smallest"}),
    Figure("svd-entropy", "SVD entropy", "svd_entropy", "SVD entropy of W",
           "How evenly the squared singular values are spread: 1 if all are equal, 0 for rank one.", weights=True),
    Figure("hyperspherical-energy", "Hyperspherical energy", "hyperspherical_energy", "hyperspherical energy",
           "Sum over all pairs of normalized rows of one over their distance: low if the neurons are spread evenly.",
           weights=True),
    _turning("R", "outputs"),
    _turning("P", "inputs"),
)  # fmt: skip


def drawn(experiment: Experiment) -> tuple[list[tuple[Figure, pd.DataFrame]], list[str]]:
    """The figures with their curves, and the titles of those without data."""
    rotating = any(row["orthogonality_error"] is not None for row in experiment.rows)
    found = [(figure, curves(experiment, figure)) for figure in (*FIGURES, *(POET if rotating else ()))]
    missing = [figure.title for figure, frame in found if frame.empty and not figure.weights]
    return [(figure, frame) for figure, frame in found if len(frame)], missing


def smoothing_window(experiment: Experiment) -> int:
    """Window of the moving average: a fortieth of the longest run."""
    return max((len(run.metrics) // 40 for run in experiment.runs), default=0) or 1


def curves(experiment: Experiment, figure: Figure) -> pd.DataFrame:
    """One row per point: arm, weight, quantity, x, mean, low, high and seeds."""
    window, parts = smoothing_window(experiment) if figure.smooth else 1, []
    for arm in arm_names(experiment.rows):
        runs = [run for run in experiment.runs if run.arm == arm]
        probes = [_derived(run.probes) for run in runs if len(run.probes)]
        for weight in dict.fromkeys(name for of in probes for name in of.weight) if figure.weights else [""]:
            frames = [of[of.weight == weight] for of in probes] if weight else [run.metrics for run in runs]
            for y in (figure.y, *figure.thin):
                keys = (y, *figure.band.get(y, ()))
                line, *bounds = (curve(frames, figure.x, key, window, figure.log) for key in keys)
                if line is not None:
                    if bounds and bounds[0] is not None and bounds[1] is not None:
                        line = line.assign(low=bounds[0]["mean"], high=bounds[1]["mean"])
                    parts.append(line.assign(arm=arm, weight=weight, quantity=figure.thin.get(y, "")))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def curve(frames: list[pd.DataFrame], x: str, y: str, window: int = 1, positive: bool = False) -> pd.DataFrame | None:
    """Mean and range of y over seeds, at the steps that all seeds with y have; None if no seed has it.

    If seeds differ in x (as in seconds), a step is at their mean. NaN and Inf are gaps, as are values <= 0 if ``positive``
    (for a log axis). ``window`` smooths each seed by a trailing mean.
    """
    measured = [frame.set_index("step")[[x, y]].dropna() for frame in frames if y in frame]
    if not (measured := [frame for frame in measured if len(frame)]):
        return None
    places, values = (pd.concat([of[key] for of in measured], axis=1, join="inner").sort_index() for key in (x, y))
    values = values.where(np.isfinite(values) & ((values > 0) | (not positive)))
    values = values.rolling(window, min_periods=1).mean().where(values.notna())
    if values.isna().all(axis=None):
        return None
    across: dict[str, Any] = {"axis": 1, "skipna": False}
    ends = {"mean": values.mean(**across), "low": values.min(**across), "high": values.max(**across)}
    return thinned(pd.DataFrame({"x": places.mean(axis=1), **ends, "seeds": len(measured)}), MOST)


def thinned(frame: pd.DataFrame, most: int) -> pd.DataFrame:
    """Evenly spaced rows, including the first and the last."""
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, min(len(frame), most)).round().astype(int))]


def _derived(probes: pd.DataFrame) -> pd.DataFrame:
    """The probes with the bounds of the trace probe."""
    for side in (side for side in "RP" if f"{side}.trace" in probes):
        trace, spread = probes[f"{side}.trace"], 2 * probes[f"{side}.trace_std"]
        probes = probes.assign(**{f"{side}.low": trace - spread, f"{side}.high": trace + spread})
    return probes


def plot(figure: Figure, frame: pd.DataFrame, arms: Sequence[str]) -> dict[str, Any]:
    """plotly's JSON: a band and a line per arm, weight and quantity. The page's script colours them by ``meta.arm``."""
    data: list[dict[str, Any]] = []
    # If arms were measured at different x, the tooltips under one pointer show different x.
    apart = frame.groupby(LINE).x.agg(tuple).nunique() > 1
    at = {"seconds": " at %{x:.4g} s", "tokens": " at %{x:,.0f} tokens"}[figure.x] if apart else ""
    for (arm, weight, quantity), points in frame.groupby(LINE, sort=False):
        place = arms.index(arm)
        numbers = points[NUMBERS].map(lambda value: float(f"{value:.7g}"))
        x, mean, low, high = (numbers[key].replace({math.nan: None}).tolist() for key in NUMBERS)
        own: dict[str, Any] = {"type": "scatter", "legendgroup": str(place), "meta": {"arm": place, "weight": weight}}
        own["name"] = escape(f"{arm} ({quantity})" if quantity else arm, quote=False)  # plotly renders tags
        seen = numbers.dropna()
        if banded := bool((seen.low < seen.high).any()):
            ends = {"x": [*seen.x, *seen.x[::-1]], "y": [*seen.low, *seen.high[::-1]], "fill": "toself"}
            data.append(own | ends | {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False})
        notes = [""] * len(mean)
        if figure.y.endswith("loss"):
            notes = [f", perplexity {significant(math.exp(y))}" if y is not None and y < 700 else "" for y in mean]
        between = " (%{customdata[1]:.5g} to %{customdata[2]:.5g})" if banded else ""
        few = len(points) <= 40 and not quantity
        line = {
            "x": x, "y": mean, "customdata": list(zip(notes, low, high, strict=True)), "showlegend": not quantity,
            "hovertemplate": f"%{{y:.5g}}{between}%{{customdata[0]}}{at}",
            "mode": "lines+markers" if few else "lines", "marker": {"size": 5},
            "line": {"width": 1 if quantity else 2, "dash": DASHES[place // len(COLOURS) % len(DASHES)]},
        }  # fmt: skip
        data.append(own | line)
    axis = "training time (s)" if figure.x == "seconds" else f"training {figure.x}"
    return {"name": figure.name, "data": data, "x": axis, "y": figure.label, "log": figure.log}


def caption(figure: Figure, frame: pd.DataFrame, arms: Sequence[str], window: int) -> str:
    sentences, (low, high) = [figure.reading], (frame.seeds.min(), frame.seeds.max())
    if figure.smooth:
        over = f"Smoothed: each point is the mean over the last {window} steps."
        sentences.append(over if window > 1 else "Not smoothed.")
    if (frame.groupby(LINE).size() == MOST).any():
        sentences.append(f"{MOST} evenly spaced points of each curve are drawn.")
    seeds, banded = f"{low}" if low == high else f"{low} to {high}", not figure.band
    lines = f"Lines are means over {seeds} seeds" + ", bands reach from the lowest to the highest seed" * banded
    sentences.append(f"{lines}." if high > 1 else "One seed" + ", so there is no band" * banded + ".")
    if missing := [arm for arm in arms if arm not in set(frame.arm)]:
        what = "no positive value" if figure.log else "no value"
        sentences.append(f"Left out, with {what} of this quantity: {', '.join(missing)}.")
    return " ".join(sentences)


def alternative(figure: Figure, frame: pd.DataFrame) -> str:
    """The alternative text for screen readers."""
    lines = frame[frame.quantity == ""].dropna().groupby(LINE, sort=False)
    last = lines["mean"].last().groupby("arm", sort=False).mean()
    values = ", ".join(f"{arm} {significant(value, 4)}" for arm, value in last.items())
    of = ", the mean over the weights" if figure.weights else ""
    return f"Line chart, {figure.title}: one line per arm against training {figure.x}. Last values{of}: {values}."


def values(figure: Figure, frame: pd.DataFrame) -> Table:
    """The figure's numbers at evenly spaced points."""
    listed = pd.concat([thinned(of, LISTED) for _, of in frame.groupby(LINE, sort=False)])
    named = [key for key in LINE[1:] if (listed[key] != "").any()]
    rows = []
    for of in listed.to_dict("records"):
        names = [Cell(of[key] or figure.y) for key in named]
        rows.append((of["arm"], names + [Cell(significant(of[key], 5), value=of[key]) for key in NUMBERS]))
    return Table("arm", [(column, "") for column in (*named, figure.x, "mean", "lowest", "highest")], rows)
