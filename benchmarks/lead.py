"""Plot the loss of every plain arm of ``reproduce pit-budgets`` minus that of PIT with a trained memory, over training tokens.

    python -m benchmarks.lead runs/budgets --out benchmarks/results/lead-cpu.json --figure docs/figures/lead.svg

Each folder is one panel. Lines show the mean over seeds of the paired difference in validation loss, bands the range over
seeds; PIT is better above zero. Every arm uses its best trial at every budget. The JSON file contains the loss of each seed
and trial.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks._figure import pyplot, save
from experiments.budgets import candidates, trial_specs
from manifold_tying.models import preset
from manifold_tying.training import Settings
from manifold_tying.training.arms import run_folder
from manifold_tying.training.report.figures import COLOURS

PIT = "pit-trainable"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Options:
    """Input and output."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of reproduce pit-budgets."""
    out: Path | None = None
    """JSON file to write."""
    figure: Path | None = None
    """SVG file to draw."""


def read(folder: Path) -> dict[str, Any]:
    """Losses of a folder by budget, arm, trial and seed, and each arm's best trial by seed 0."""
    rows = []
    shape, corpus = "", ""
    for budget in sorted(folder.glob("tokens-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        tokens = int(budget.name.rpartition("-")[2])
        given = json.loads((budget / "experiment.json").read_text(encoding="utf-8"))["settings"]
        shape, corpus = given["preset"], given["data"]
        settings = Settings(preset=shape, data=corpus, steps=given["steps"])
        for key, candidate in candidates(preset(shape).hidden_size).items():
            losses = {spec: _losses(budget, spec) for spec in trial_specs(candidate, settings)}
            tried = {spec: by_seed[0] for spec, by_seed in losses.items() if 0 in by_seed}
            if tried:
                best = min(tried, key=lambda spec: tried[spec])
                rows.append(
                    {
                        "tokens": tokens,
                        "arm": key,
                        "label": candidate.label,
                        "plain": candidate.plain,
                        "chosen": best,
                        "losses": losses[best],
                        "trials": tried,
                    }
                )
    return {"folder": folder.name, "preset": shape, "data": corpus, "rows": rows}


def _losses(budget: Path, spec: str) -> dict[int, float]:
    """Validation losses of an arm's finished runs, by seed."""
    found = {}
    for path in budget.glob("*/result.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        if path.parent == run_folder(budget, spec, row["seed"]):
            found[row["seed"]] = row["val_loss"]
    return dict(sorted(found.items()))


def _above(losses: Mapping[int, float], pit: Mapping[int, float]) -> tuple[float, float, float]:
    """Mean, minimum and maximum of the differences by seed."""
    differences = [losses[seed] - pit[seed] for seed in losses if seed in pit]
    return sum(differences) / len(differences), min(differences), max(differences)


def draw(panels: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the figure; equal numbers give equal files."""
    from matplotlib.ticker import EngFormatter

    plt = pyplot("lead")
    figure, grid = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.2), squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        pit = {row["tokens"]: row["losses"] for row in panel["rows"] if row["arm"] == PIT}
        axes.axhline(0.0, color="#000000", linewidth=1.2, label="PIT, Z trained")
        names = list(dict.fromkeys(row["arm"] for row in panel["rows"] if row["plain"]))
        for place, name in enumerate(names):
            rows = [row for row in panel["rows"] if row["arm"] == name and row["tokens"] in pit]
            tokens = [row["tokens"] for row in rows]
            middle, low, high = zip(*(_above(row["losses"], pit[row["tokens"]]) for row in rows), strict=True)
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            axes.plot(tokens, middle, label=rows[0]["label"], color=colour, marker=marker)
            axes.fill_between(tokens, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(sorted(pit))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(EngFormatter(places=1, sep=""))
        axes.set_title(f"{panel['preset']}, {panel['data']}", fontsize="medium")
        axes.set_xlabel("training tokens")
        axes.set_ylabel("validation loss above PIT's (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save(plt, figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    panels = [read(folder) for folder in options.folders]
    if options.out is not None:
        options.out.write_text(json.dumps(panels, indent=1) + "\n", encoding="utf-8")
    if options.figure is not None:
        draw(panels, options.figure)


if __name__ == "__main__":
    main()
