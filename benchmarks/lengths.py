"""The figure of docs/from-scratch.md: each arm's validation loss minus the best tied table's, over training tokens.

    python -m benchmarks.lengths --figure docs/figures/lengths.svg

Reads the results of `ablate` and `reproduce pit-length` that the page names. Bars show one standard deviation over seeds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import tyro

from benchmarks._command import ROOT
from benchmarks._figure import pyplot, save
from manifold_tying.training.report.figures import COLOURS

PIT_LENGTH = 1_843_200
# Arm of the ablation: its label in the table at 1,843,200 tokens, and a horizontal shift that keeps bars apart.
ARMS = {
    "transpose": ("transpose tying", 0.94),
    "transpose+embedding_norm=true": ("transpose tying, embeddings normalized", 1.0),
    "untied+embedding_norm=true": ("untied, embeddings normalized", 1.03),
    "pit-free": ("PIT, free table", 1.06),
}
REFERENCE = "transpose tying, embeddings normalized"


@dataclass(frozen=True)
class Options:
    """Input and output."""

    results: Path = ROOT / "benchmarks/results"
    figure: Path = ROOT / "docs/figures/lengths.svg"


def losses(results: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Mean and standard deviation of the validation loss, by label and tokens."""
    files = [results / f"table-rates-{name}.json" for name in ("nano-cpu", "nano-long-cpu")]
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["summary"]]
    longest = json.loads((results / "papers-pit-length-nano-cpu.json").read_text(encoding="utf-8"))["tables"][0]["body"]
    printed = {label: [float(number) for number in loss.split(" ± ")] for label, loss, *_ in longest}
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for arm, (label, _) in ARMS.items():
        own = [row for row in rows if row["arm"].partition("+lr=")[0] == arm]
        for tokens in sorted({row["tokens"] for row in own}):
            values = [row["val_loss"] for row in own if row["tokens"] == tokens]
            found.setdefault(label, {})[tokens] = mean(values), stdev(values)
        found[label][PIT_LENGTH] = printed[label][0], printed[label][1]
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    found = losses(options.results)
    plt = pyplot("lengths")
    figure, axes = plt.subplots(figsize=(8, 4))
    for (label, shift), colour in zip(ARMS.values(), COLOURS, strict=False):
        tokens = sorted(found[label])
        above = [found[label][count][0] - found[REFERENCE][count][0] for count in tokens]
        x = [count * shift for count in tokens]
        axes.errorbar(
            x, above, [found[label][count][1] for count in tokens], fmt="o-", color=colour, label=label, capsize=3
        )
    axes.set_xscale("log")
    axes.set_xticks([184_320, 614_400, PIT_LENGTH, 6_000_640], ["0.18 M", "0.6 M", "1.8 M", "6 M"])
    axes.minorticks_off()
    axes.set_xlabel("training tokens")
    axes.set_ylabel("nats above normalized transpose tying")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(plt, figure, options.figure)


if __name__ == "__main__":
    main()
