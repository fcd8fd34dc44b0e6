"""How bodies of a model train: loss, time, memory, and how far singular values move. Tables of docs/bodies.md.

    python -m benchmarks.bodies runs/bodies   # adds the finished runs of `ablate --tokens` in these folders
    python -m benchmarks.bodies               # prints the tables

The runs are in benchmarks/results/bodies-cpu.json. Times are those of each body's fastest run, on one thread of two, beside
others. Drift is the largest move of a quantile of a weight's singular values over the run, divided by the weight's largest one
at the start.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks._command import ROOT
from experiments.comparison import markdown_table

KEPT = ("arm", "seed", "tokens", "val_loss", "tokens_per_second", "peak_memory_bytes", "trainable_parameters", "drift")
Runs = dict[tuple[str, int], dict[str, dict[str, list[dict[str, Any]]]]]
"""Preset and tokens: body: rate: runs by seed."""


@dataclass(frozen=True)
class Options:
    """What to add and to read."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of ablate whose runs are added to the results."""
    results: Path = ROOT / "benchmarks/results/bodies-cpu.json"


def drift_of(run: Path) -> float:
    first, *_, last = (json.loads(line)["weights"] for line in (run / "probes.jsonl").read_text().splitlines())
    moves = []
    for name, weight in first.items():
        start, end = (np.array(at["singular_values"]) for at in (weight, last[name]))
        moves.append(np.abs(end - start).max() / start.max())
    return float(max(moves))


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """A row for every finished run of every budget in a folder of ablate."""
    rows = []
    for budget in sorted(folder.glob("tokens-*")):
        preset = json.loads((budget / "experiment.json").read_text(encoding="utf-8"))["settings"]["preset"]
        for path in sorted(budget.glob("*/result.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            found |= {"arm": path.parent.name.rpartition("-")[0], "drift": drift_of(path.parent)}
            rows.append({"preset": preset, **{key: found[key] for key in KEPT}})
    return rows


def grouped(rows: list[dict[str, Any]]) -> Runs:
    found: Runs = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows, key=lambda row: row["seed"]):
        body, *changes = row["arm"].split("+")
        given: dict[str, str] = dict(change.split("=") for change in changes)
        found[row["preset"], row["tokens"]][body][given.get("body_lr") or given["lr"]].append(row)
    return found


def table(found: Runs) -> str:
    """The best rate of each body by seed 0, of those with the most seeds, and its other trials."""
    tables = []
    for (preset, tokens), bodies in found.items():
        body = []
        best = {
            name: min(rates, key=lambda rate: (-len(rates[rate]), rates[rate][0]["val_loss"]))
            for name, rates in bodies.items()
        }
        reference = max(run["tokens_per_second"] for run in bodies["adamw"][best["adamw"]])
        for name, rates in bodies.items():
            runs = rates[best[name]]
            losses = [run["val_loss"] for run in runs]
            time = reference / max(run["tokens_per_second"] for run in runs)
            others = {rate: of[0]["val_loss"] for rate, of in rates.items()}
            body.append([
                f"`{name}`", f"{mean(losses):.3f}" + (f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""), f"{len(losses)}",
                f"{time:.2f}", f"{max(run['peak_memory_bytes'] for run in runs) / 1e6:,.0f}",
                f"{max(run['drift'] for run in runs):.1e}", best[name],
                " / ".join(f"{float(rate):g}: {loss:.3f}" for rate, loss in others.items()) if len(others) > 1 else "",
            ])  # fmt: skip
        head = [f"{preset}, {tokens:,} tokens", "validation loss", "seeds", "time of `adamw`", "MB", "drift", "rate"]
        tables.append(markdown_table([*head, "trials on seed 0"], body))
    return "\n\n".join(tables)


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    old = json.loads(options.results.read_text(encoding="utf-8"))["rows"] if options.results.exists() else []
    rows = {(row["preset"], row["tokens"], row["arm"], row["seed"]): row for row in old}
    for row in (row for folder in options.folders for row in runs_of(folder)):
        rows[row["preset"], row["tokens"], row["arm"], row["seed"]] = row
    if options.folders:
        options.results.write_text(
            json.dumps({"rows": [rows[key] for key in sorted(rows)]}, indent=1) + "\n", encoding="utf-8"
        )
    print(table(grouped(list(rows.values()))))


if __name__ == "__main__":
    main()
