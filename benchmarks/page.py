"""The pages of results: the files in benchmarks/results as sections of docs/benchmarks.md and docs/papers.md.

python -m benchmarks.page            # writes them
python -m benchmarks.page --check    # exits with 1 where a page differs from the results
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import papers
from benchmarks._command import ROOT, columns
from benchmarks._summary import ORDER, place, summary

HEADER = """# Benchmarks

Written by `python -m benchmarks.page` from `benchmarks/results`; do not edit. Each section names the
command that measured it; `python -m benchmarks.NAME --help` says what is timed.

Contenders of a row take turns round by round in one process. Times are medians over rounds. The column × NAME is the median
over rounds of a contender's time over that of NAME in the same round. Extra memory is the peak during a step above the level
before it, each in a process of its own.
"""


@dataclass(frozen=True)
class Options:
    """Where results are and where the pages go."""

    results: Path = ROOT / "benchmarks/results"
    page: Path = ROOT / "docs/benchmarks.md"
    papers: Path = ROOT / "docs/papers.md"
    check: bool = False
    """Write nothing; exit with 1 where a page differs."""


def render(results: Path) -> str:
    """The page, the same for the same files."""
    read = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in results.glob("*.json")]
    found = sorted((_rank(name, result), name, result) for name, result in read if is_result(result))
    if not found:
        return "\n".join([HEADER, "No results yet.\n"])
    sections = [_section(name, result) for _, name, result in found]
    return "\n".join([HEADER, summary([result for *_, result in found]), *sections])


def is_result(data: Any) -> bool:
    """Whether a file is a benchmark's: the folder holds summaries of ablations too, and times of one step without rows."""
    return isinstance(data, dict) and "benchmark" in data and "rows" in data


def _rank(name: str, result: dict[str, Any]) -> tuple[int, bool, str]:
    """Where a section stands: by benchmark, in the summary's order, float32 first."""
    benchmark = result["benchmark"]
    return ORDER.index(benchmark) if benchmark in ORDER else len(ORDER), result["dtype"] != "float32", name


def _section(name: str, result: dict[str, Any]) -> str:
    machine = dict(result["machine"])
    peers = ", ".join(f"{peer} {version}" for peer, version in machine.pop("peers").items() if version)
    machine_text = ", ".join(f"{key} {value}" for key, value in machine.items())
    # Of a training step there is a file for each preset, with which the labels of its rows begin.
    model = [result["rows"][0]["row"].split()[0]] if result["benchmark"] == "training_step" else []
    head = [
        f"## {', '.join([result['title'], *model, *place(result)])}",
        "",
        f"`benchmarks/results/{name}`. Machine: {machine_text}. Peers: {peers}.",
        "",
    ]
    return "\n".join([*head, *(line for row in result["rows"] for line in _row(row))])


def _row(row: dict[str, Any]) -> list[str]:
    """A row of the result: a heading, its table, and notes on single contenders."""
    shown = columns(row)
    origin = f"`{row['command']}` at commit {row['commit']}"
    table = [_line(["contender", *shown]), _line(["---", *("---:" for _ in shown)])]
    lines = [f"### {row['row']}", "", origin, "", *table]
    notes = []
    for name, values in row["contenders"].items():
        note = values.get("unavailable") or values.get("note")
        if note:
            notes.append(f"- {name}: {note}")
        if "unavailable" not in values:
            lines.append(_line([name, *(cells.get(name, "") for cells in shown.values())]))
    return [*lines, "", *notes, *([""] if notes else [])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    for path, text in ((options.page, render(options.results)), (options.papers, papers.render(options.results))):
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} differs from the results; run python -m benchmarks.page")


if __name__ == "__main__":
    main()
