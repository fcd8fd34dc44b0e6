"""Compare the operation counts of docs/scaling.md with measured times, in a Markdown table.

    python -m benchmarks.scaling

Reads results of riemannian_step and interface. "counted" is the ratio of operations to the reference's, "measured" the ratio of
times. The reference multiplies matrices of the same shapes, so the machine's speed cancels.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import _operations as count
from benchmarks._command import ROOT
from benchmarks._command import Options as MeasureOptions
from benchmarks.interface import Problem
from experiments.comparison import markdown_table


@dataclass(frozen=True)
class Options:
    """Which results to read."""

    step: Path = ROOT / "benchmarks/results/riemannian-step-cpu.json"
    interface: Path = ROOT / "benchmarks/results/interface-cpu.json"


def table(step: list[dict[str, Any]], interface: list[dict[str, Any]]) -> str:
    lines = []
    for row in step:
        if row["reference"] != "floor" or not row["row"].startswith("V="):
            continue  # small points and batches, whose time is overhead
        V, d = sizes(row)
        floor = "floor (fused Adam)"
        for name, every in (("ours", 1), ("ours, project_every=8", 8)):
            counted = count.riemannian_step(V, d, every) / count.floor(V, d)
            lines.append(_line("step, " + name, row, floor, counted, _ratio(row, name, floor)))
    for row in interface:
        V, d, N = sizes(row)
        distinct = len(Problem(V, d, N, MeasureOptions()).ids.unique())
        for name in ("pit-frozen", "pit-trainable"):
            frozen = name == "pit-frozen"
            operations = count.loss(V, d, N, frozen) + count.transform(d, N, distinct, frozen)
            counted = operations / count.loss(V, d, N)
            lines.append(_line(name, row, "transpose", counted, _ratio(row, name, "transpose")))
    return markdown_table(["what", "size", "against", "counted", "measured"], lines, left=3)


def sizes(row: dict[str, Any]) -> list[int]:
    """The numbers in a row's label."""
    return [int(number) for number in re.findall(r"=(\d+)", row["row"])]


def _ratio(row: dict[str, Any], name: str, reference: str) -> float:
    contenders = row["contenders"]
    return contenders[name]["milliseconds"] / contenders[reference]["milliseconds"]


def _line(what: str, row: dict[str, Any], reference: str, counted: float, measured: float) -> list[str]:
    return [what, row["row"], reference, f"{counted:.2f}", f"{measured:.2f}"]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    print(table(*(json.loads(path.read_text())["rows"] for path in (options.step, options.interface))))


if __name__ == "__main__":
    main()
