"""Losses against training tokens, every table at its tuned rate: tables of docs/from-scratch.md and its first figure.

    python -m benchmarks.lengths runs/rates runs/mini   # adds the finished runs of `ablate --tokens` in these folders
    python -m benchmarks.lengths                        # prints the tables and draws the figure

The losses are in benchmarks/results/lengths-cpu.json, one row per run; those of `reproduce pit-length` in its own file. An arm
with several settings is shown at the one that is best for seed 0. Bars are one standard deviation over the seeds.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import tyro

from benchmarks._command import ROOT
from benchmarks._figure import pyplot, save
from experiments.comparison import markdown_table
from manifold_tying.models import PRESETS
from manifold_tying.training.numbers import Summary
from manifold_tying.training.report.figures import COLOURS

PIT_LENGTH = 1_843_200
REFERENCE = "transpose tying, embeddings normalized"
FREE = "PIT, free table"
FROZEN = "PIT, Z frozen"  # not drawn: nats above the others
# Label: start of the arm's name, and how far a dot is moved so that bars do not overlap.
ARMS = {
    "transpose tying": ("transpose+lr=", 0.94),
    REFERENCE: ("transpose+embedding_norm=true", 1.0),
    "untied": ("untied+lr=", 1.0),
    "untied, embeddings normalized": ("untied+embedding_norm=true", 1.03),
    "PIT, Z trained": ("pit-trainable", 1.03),
    FREE: ("pit-free", 1.06),
    FROZEN: ("pit-frozen", 1.0),
}
PANELS = (("nano", "stdlib"), ("nano", "prose"), ("mini", "stdlib"))
KEPT = ("tokens", "arm", "seed", "val_loss", "delta_ti", "cond_transform", "trainable_parameters")


Losses = dict[tuple[str, str], dict[str, dict[int, Summary]]]
"""Preset and corpus: label: training tokens: loss."""


@dataclass(frozen=True)
class Options:
    """What to add, to read and to draw."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of ablate whose runs are added to the results."""
    results: Path = ROOT / "benchmarks/results"
    figure: Path = ROOT / "docs/figures/lengths.svg"


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """A row for every finished run of every budget in a folder of ablate."""
    rows = []
    for budget in sorted(folder.glob("tokens-*")):
        given = json.loads((budget / "experiment.json").read_text(encoding="utf-8"))["settings"]
        corpus = "prose" if given["data"].startswith("text:") else given["data"]
        size = given.get("vocabulary")
        shape = given.get("preset", "continued") + (f", V = {size:,}" if size else "")
        for path in sorted(budget.glob("*/result.json")):
            row = json.loads(path.read_text(encoding="utf-8"))
            row["arm"] = path.parent.name.rpartition("-")[0]  # a run of one of `ablate --dry-run`'s commands lacks it
            rows.append({"preset": shape, "data": corpus, **{key: row[key] for key in KEPT}})
    return rows


def losses(results: Path) -> Losses:
    """The loss of each arm at the best of its settings."""
    rows = json.loads((results / "lengths-cpu.json").read_text(encoding="utf-8"))["rows"]
    by_setting: Mapping[tuple[str, str, str, int], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        label = next(label for label, (start, _) in ARMS.items() if row["arm"].startswith(start))
        by_setting[row["preset"], row["data"], label, row["tokens"]][row["arm"]][row["seed"]] = row["val_loss"]
    found: Losses = defaultdict(lambda: defaultdict(dict))
    for (preset, data, label, tokens), settings in by_setting.items():
        values = list(min(settings.values(), key=lambda seeds: seeds[0]).values())
        found[preset, data][label][tokens] = Summary(
            mean(values), stdev(values) if len(values) > 1 else None, len(values)
        )
    printed = json.loads((results / "papers-pit-length-nano-cpu.json").read_text(encoding="utf-8"))["tables"][0]["body"]
    for label, loss, *_ in printed:
        middle, deviation = map(float, loss.split(" ± "))
        found["nano", "stdlib"][label][PIT_LENGTH] = Summary(middle, deviation, 3)
    return found


def table(found: Losses) -> str:
    """The losses as Markdown."""
    tables = []
    for (preset, data), arms in found.items():
        counts = sorted({tokens for of_arm in arms.values() for tokens in of_arm})
        cells = {label: [_cell(of[n]) if n in of else "" for n in counts] for label in ARMS for of in [arms[label]]}
        body = [[label, *own] for label, own in cells.items() if any(own)]
        tables.append(markdown_table([f"{preset}, {data}", *(f"{tokens:,} tokens" for tokens in counts)], body))
    return "\n\n".join(tables)


def _cell(loss: Summary) -> str:
    return f"{loss.mean:.3f}" + ("" if loss.sd is None else f" ± {loss.sd:.3f}")


def leads(found: Losses) -> str:
    """How far the free table is below normalized transpose tying, by training tokens per entry of the vocabulary."""
    rows = []
    for (shape, data), arms in found.items():
        name, _, size = shape.partition(", V = ")
        if name not in ("nano", "mini"):  # normalized embeddings hurt `bytes`
            continue
        for tokens in sorted(arms[FREE].keys() & arms[REFERENCE].keys()):
            entries = int(size.replace(",", "")) if size else PRESETS[name].vocab_size
            lead = arms[REFERENCE][tokens].mean - arms[FREE][tokens].mean
            rows.append((tokens / entries, [f"{tokens / entries:,.0f}", shape, data, f"{tokens:,}", f"{lead:+.3f}"]))
    head = ["tokens per entry", "model", "corpus", "tokens", "lead"]
    return markdown_table(head, [row for _, row in sorted(rows)], left=0)


def draw(found: Losses, path: Path) -> None:
    """One panel per model and corpus: the loss of each arm above that of normalized transpose tying."""
    plt = pyplot("lengths")
    figure, grid = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 4), sharey=True)
    for axes, (preset, data) in zip(grid, PANELS, strict=True):
        arms = found[preset, data]
        for (label, (_, shift)), colour in zip(ARMS.items(), COLOURS, strict=False):
            counts = sorted(set(arms[label]) & set(arms[REFERENCE]))
            above = [arms[label][count].mean - arms[REFERENCE][count].mean for count in counts]
            bars = [arms[label][count].sd or 0.0 for count in counts]
            x = [count * shift for count in counts]
            if counts and label != FROZEN:
                axes.errorbar(x, above, bars, fmt="o-", color=colour, label=label, capsize=3)
        ticks = sorted(arms[REFERENCE])
        axes.set_xscale("log")
        axes.set_xticks(
            ticks, [f"{tokens / 1e6:.1f} M" if tokens >= 5e5 else f"{tokens / 1e6:.2f} M" for tokens in ticks]
        )
        axes.set_xlim(0.14e6, 8e6)
        axes.minorticks_off()
        axes.set_title(f"{preset}, {'Python source' if data == 'stdlib' else data}", fontsize="medium")
        axes.set_xlabel("training tokens")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("nats above normalized transpose tying")
    grid[-1].legend(*grid[0].get_legend_handles_labels(), frameon=False, fontsize="small", loc="lower right")
    save(plt, figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    path = options.results / "lengths-cpu.json"
    if added := [row for folder in options.folders for row in runs_of(folder)]:
        kept = json.loads(path.read_text(encoding="utf-8"))
        names = ("preset", "data", "tokens", "arm", "seed")
        rows = {tuple(row[name] for name in names): row for row in [*kept["rows"], *added]}
        path.write_text(json.dumps({**kept, "rows": list(rows.values())}, indent=1) + "\n", encoding="utf-8")
    found = losses(options.results)
    print(table(found), leads(found), sep="\n\n")
    draw(found, options.figure)


if __name__ == "__main__":
    main()
