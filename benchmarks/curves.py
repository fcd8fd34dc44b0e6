"""Curves of ablations, as numbers that can be kept and as one figure: a column per folder, a row per quantity.

    python -m benchmarks.curves runs/nano runs/mini --out benchmarks/results/curves.json --figure docs/figures/curves.svg

A folder is what ``manifold-tying ablate`` or ``reproduce`` wrote. A line is the mean over seeds, its band reaches from the
lowest to the highest seed; the training loss is smoothed over a fortieth of the run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from benchmarks._figure import pyplot, save
from manifold_tying.training.report._experiment import Experiment, arm_names, interface_of
from manifold_tying.training.report._palette import looks
from manifold_tying.training.report._reading import load_experiment
from manifold_tying.training.report._series import TOKENS, curve, smoothing_window

Quantity = Literal["loss", "val_loss", "delta_ti", "defect", "cond_transform"]

LABELS: dict[Quantity, str] = {
    "loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "delta_ti": "‖W_out E − I‖",
    "defect": "‖ZᵀZ − I‖ / √d",
    "cond_transform": "cond(T)",
}
LINEAR = ("loss", "val_loss")
MOST = 60  # points of a curve that are kept


@dataclass(frozen=True)
class Options:
    """What to read and to write."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that ablate or reproduce wrote."""
    quantities: tuple[Quantity, ...] = ("loss", "val_loss", "delta_ti")
    """A row of the figure for each."""
    out: Path | None = None
    """JSON file to write."""
    figure: Path | None = None
    """SVG file to draw."""


def curves_of(experiment: Experiment, quantity: Quantity) -> dict[str, dict[str, list[float]]]:
    """Arm: tokens, mean, low, high."""
    window = smoothing_window(experiment.runs) if quantity == "loss" else 1
    found = {}
    for arm in arm_names(experiment.rows):
        runs = [run for run in experiment.runs if run.arm == arm]
        line = curve(runs, x=TOKENS, y=quantity, window=window, positive=quantity not in LINEAR, most=MOST)
        if line is not None:
            parts = {"tokens": line.x, "mean": line.mean, "low": line.low, "high": line.high}
            found[arm] = {name: [float(f"{value:.6g}") for value in values] for name, values in parts.items()}
    return found


def draw(panels: Sequence[dict[str, Any]], quantities: Sequence[Quantity], path: Path) -> None:
    """The figure, the same file for the same numbers."""
    from matplotlib.ticker import EngFormatter

    plt = pyplot("curves")
    size = (4.6 * len(panels), 3.1 * len(quantities))
    figure, grid = plt.subplots(len(quantities), len(panels), figsize=size, squeeze=False)
    for column, panel in enumerate(panels):
        look = {interface_of(arm): one for arm, one in looks(panel["arms"]).items()}
        for row, quantity in enumerate(quantities):
            axes = grid[row, column]
            for arm, line in panel["curves"][quantity].items():
                of_arm = look[interface_of(arm)]
                marker = {"marker": of_arm.marker if len(line["tokens"]) < 10 else ""}
                axes.plot(line["tokens"], line["mean"], label=interface_of(arm), **(of_arm.line | marker))
                axes.fill_between(line["tokens"], line["low"], line["high"], **of_arm.band)
            axes.set_yscale("linear" if quantity in LINEAR else "log")
            axes.set_title(panel["preset"], fontsize="medium")
            axes.set_xlabel("training tokens")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_ylabel(LABELS[quantity])
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    save(plt, figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    panels = []
    for folder in options.folders:
        experiment = load_experiment(folder)
        source = experiment.sources[0]
        panels.append(
            {
                "folder": source.name,
                "preset": experiment.settings.get("preset", ""),
                "machine": source.machine,
                "arms": arm_names(experiment.rows),
                "summary": experiment.rows,
                "curves": {quantity: curves_of(experiment, quantity) for quantity in options.quantities},
            }
        )
    if options.out is not None:
        options.out.write_text(json.dumps(panels, indent=1) + "\n", encoding="utf-8")
    if options.figure is not None:
        draw(panels, options.quantities, options.figure)


if __name__ == "__main__":
    main()
