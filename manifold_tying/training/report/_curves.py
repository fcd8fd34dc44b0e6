"""Which figures there are, and what is said below them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manifold_tying.training._files import write_whole
from manifold_tying.training.report._drawing import Axis, Drawn, draw
from manifold_tying.training.report._experiment import Experiment, arm_names
from manifold_tying.training.report._numbers import significant
from manifold_tying.training.report._palette import looks
from manifold_tying.training.report._series import MOST, SECONDS, TOKENS, Curve, curve, of_seeds, smoothing_window
from manifold_tying.training.report._weights import weight_figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One quantity against tokens or time."""

    name: str
    """The file's name, without .png."""
    title: str
    quantity: str
    """The key in metrics.jsonl."""
    label: str
    """The y axis, with its unit."""
    against: str = TOKENS
    log: bool = False
    zoom: bool = False
    """A second panel with the end alone: differences at the end are small against the fall at the beginning."""
    smooth: bool = False
    reading: str
    """How to read it."""


PLOTS = (
    Plot(
        name="val-loss-tokens",
        title="Validation loss against tokens",
        quantity="val_loss",
        label="validation loss (nats per token)",
        zoom=True,
        reading="Equal data: which arm learns most from the same tokens. Below, the last half alone.",
    ),
    Plot(
        name="val-loss-seconds",
        title="Validation loss against time",
        quantity="val_loss",
        label="validation loss (nats per token)",
        against=SECONDS,
        zoom=True,
        reading="Equal time: the same losses, with what each arm costs per step counted in. Below, "
        "from half the time of the fastest arm on.",
    ),
    Plot(
        name="train-loss-tokens",
        title="Training loss",
        quantity="loss",
        label="training loss (nats per token)",
        smooth=True,
        reading="The loss of the batches as they were trained on.",
    ),
    Plot(
        name="defect",
        title="Defect",
        quantity="defect",
        label="defect, ‖Z⊤Z − I‖ / √d",
        log=True,
        reading="How far the memory is off the Stiefel manifold; float32 rounding alone gives about 10⁻⁷.",
    ),
    Plot(
        name="delta-ti",
        title="Interface consistency ΔTI",
        quantity="delta_ti",
        label="ΔTI, ‖Wₒᵤₜ E − I‖",
        log=True,
        reading="How far unembedding is from inverting the embedding.",
    ),
    Plot(
        name="cond-transform",
        title="Condition number of the transform",
        quantity="cond_transform",
        label="cond(T)",
        log=True,
        reading="Longest against shortest axis of the transform: 1 is a multiple of the identity.",
    ),
)


ORTHOGONALITY = Plot(
    name="orthogonality-error",
    title="Orthogonality error of POET's rotations",
    quantity="orthogonality_error",
    label="e_orth, ‖RR⊤ − I‖ / √m",
    log=True,
    reading="How far R and P are from orthogonal, the largest of all weights since the evaluation before: it grows from "
    "merge to merge, after which they start at the identity again.",
)


def drawn_figures(experiment: Experiment) -> tuple[list[Drawn], list[Plot]]:
    """Every figure for which there is data, and the plots for which there is none."""
    figures, empty = [], []
    rotating = any(row["orthogonality_error"] is not None for row in experiment.rows)
    for plot in (*PLOTS, ORTHOGONALITY) if rotating else PLOTS:
        window = smoothing_window(experiment.runs) if plot.smooth else 1
        curves = _curves(experiment, plot, window)
        if not curves:
            empty.append(plot)
            continue
        axis = Axis(label=plot.label, against=plot.against, log=plot.log, zoom=plot.zoom)
        arms = arm_names(experiment.rows)
        figures.append(
            Drawn(
                name=plot.name,
                title=plot.title,
                picture=draw(plot.name, curves, looks(arms), axis),
                against=plot.against,
                caption=_caption(plot, curves, arms, window),
                alternative=_alternative(plot, curves),
            )
        )
    return figures + (weight_figures(experiment) if rotating else []), empty


def write_figures(figures: Sequence[Drawn], out: Path) -> None:
    """Write the figures as ``out/<name>.png``."""
    for figure in figures:
        write_whole(out / f"{figure.name}.png", figure.picture.png)


def _curves(experiment: Experiment, plot: Plot, window: int) -> list[Curve]:
    by_arm = {arm: [run for run in experiment.runs if run.arm == arm] for arm in arm_names(experiment.rows)}
    drawn = (curve(runs, x=plot.against, y=plot.quantity, window=window, positive=plot.log) for runs in by_arm.values())
    return [line for line in drawn if line is not None]


def _caption(plot: Plot, curves: Sequence[Curve], arms: Sequence[str], window: int) -> str:
    sentences = [plot.reading]
    if plot.smooth:
        sentences.append(
            f"Smoothed: each point is the mean over the last {window} steps." if window > 1 else "Not smoothed."
        )
    if any(len(line.x) == MOST for line in curves):
        sentences.append(f"{MOST} evenly spaced points of each curve are drawn.")
    sentences.append(of_seeds(curves))
    left_out = [arm for arm in arms if arm not in {line.arm for line in curves}]
    if left_out:
        what = "no positive value" if plot.log else "no value"
        sentences.append(f"Left out, with {what} of this quantity: {', '.join(left_out)}.")
    return " ".join(sentences)


def _alternative(plot: Plot, curves: Sequence[Curve]) -> str:
    last: Mapping[str, float] = {line.arm: line.last for line in curves}
    values = ", ".join(f"{arm} {significant(value, 4)}" for arm, value in last.items())
    return f"Line chart, {plot.title}: one line per arm against training {plot.against}. Last values: {values}."
