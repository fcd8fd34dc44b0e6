"""Plot how far the head is from inverting the embedding while each arm trains: ‖W_out E - I‖_F / √d over training tokens.

    make ablation
    python -m benchmarks.interface_drift runs/ablation --figure docs/figures/interface-drift.svg

Lines show the median over seeds, bands the range.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks._command import ROOT
from benchmarks._figure import pyplot, save
from manifold_tying.models import preset
from manifold_tying.training.report.figures import COLOURS

ARMS = {
    "untied": "untied tables",
    "transpose": "transpose tying",
    "pit-trainable": "PIT, Z trained",
    "pit-free": "PIT, free table",
}


@dataclass(frozen=True)
class Options:
    """Input and output."""

    runs: Annotated[Path, tyro.conf.Positional]
    """Folder that ablate wrote."""
    figure: Path = ROOT / "docs/figures/interface-drift.svg"


def drift(runs: Path, arm: str) -> dict[int, list[float]]:
    """‖W_out E - I‖_F / √d of all seeds, by training tokens."""
    found: dict[int, list[float]] = {}
    for run in sorted(runs.glob(f"{arm}-[0-9]*")):
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        width = preset(config["preset"]).hidden_size
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            metrics = json.loads(line)
            if metrics.get("delta_ti") is not None:
                found.setdefault(metrics["tokens"], []).append(metrics["delta_ti"] / width**0.5)
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    plt = pyplot("interface-drift")
    figure, axes = plt.subplots(figsize=(8, 4))
    for (arm, label), colour in zip(ARMS.items(), COLOURS, strict=False):
        found = drift(options.runs, arm)
        tokens = sorted(found)
        by_seed = [sorted(found[count]) for count in tokens]
        axes.plot(tokens, [values[len(values) // 2] for values in by_seed], color=colour, label=label)
        axes.fill_between(tokens, [v[0] for v in by_seed], [v[-1] for v in by_seed], color=colour, alpha=0.2)
    axes.set_yscale("log")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("‖W_out E - I‖ / √d")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(plt, figure, options.figure)


if __name__ == "__main__":
    main()
