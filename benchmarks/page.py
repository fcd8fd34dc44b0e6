"""Write docs/benchmarks.md, docs/papers.md and the pages that they link, from the files in benchmarks/results.

python -m benchmarks.page            # writes the pages and the charts in docs/figures
python -m benchmarks.page --check    # exits with 1 if a page differs from the results
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks._command import ROOT, columns
from benchmarks._figure import chart
from benchmarks._summary import ORDER, WORDS, place, summary
from experiments.comparison import Table, markdown_table

DO_NOT_EDIT = "Written by `python -m benchmarks.page` from `benchmarks/results`; do not edit."
HEADER = f"""# Benchmarks

{DO_NOT_EDIT} `python -m benchmarks.NAME --help` describes a benchmark.

The contenders of a row take turns in every round, in one process. Times are medians over rounds. A ratio is the median over
rounds of a contender's time divided by the reference's in the same round.
"""
PAPERS_HEADER = """# The papers' comparisons

Written by `python -m benchmarks.page` from the `tables.json` of `manifold-tying reproduce` (papers-NAME.json in
`benchmarks/results`); do not edit. Each page names its command. To repeat it at another size, change `--preset`, `--tokens`,
`--seeds`, `--data` or `--device`.

Values are means over seeds ± the sample standard deviation; losses are in nats per token on held-out text. Models and corpora
here are thousands of times smaller than the papers'. So a difference from a paper's table is a result at this size only. If
arms differ by less than the spread, their order means nothing. Every arm has the learning rates of
[learning-rates.md](learning-rates.md), unless a page lists its trials.
"""
Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Input and output folders."""

    results: Path = ROOT / "benchmarks/results"
    docs: Path = ROOT / "docs"
    check: bool = False
    """Write nothing; exit with 1 if a page differs."""


def load(results: Path) -> dict[str, dict[str, Result]]:
    """Results by benchmark, in the summary's order, then by file name, float32 first."""
    found: dict[str, dict[str, Result]] = {name: {} for name in ORDER}
    read = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in results.glob("*.json")]
    for name, result in sorted(read, key=lambda item: item[0]):
        if is_result(result):
            found.setdefault(result["benchmark"], {})[name] = result
    by_dtype = {
        name: sorted(own.items(), key=lambda item: item[1]["dtype"] != "float32") for name, own in found.items()
    }
    return {name: dict(own) for name, own in by_dtype.items() if own}


def is_result(data: Any) -> bool:
    """Whether a file is a benchmark result; the folder also has summaries of ablations and step times without rows."""
    return isinstance(data, dict) and "benchmark" in data and "rows" in data


def render(results: Path) -> dict[str, str]:
    """Pages by path in docs; deterministic."""
    found = load(results)
    pages = papers(results)
    if not found:
        return pages | {"benchmarks.md": "\n".join([HEADER, "No results yet.\n"])}
    sections = [HEADER, summary([result for own in found.values() for result in own.values()])]
    for name, own in found.items():
        title = next(iter(own.values()))["title"]
        sections.append(
            f"## {title}\n\n![{title}: time over the reference's](figures/speed-{name}.svg)\n\n"
            f"[Times, memory and accuracy](benchmarks/{name}.md)\n"
        )
        text = f"# {title}\n\n{DO_NOT_EDIT} [Terms](../benchmarks.md#terms)\n"
        pages[f"benchmarks/{name}.md"] = "\n".join([text, *(_section(file, result) for file, result in own.items())])
    return pages | {"benchmarks.md": "\n".join([*sections, WORDS])}


def _section(name: str, result: Result) -> str:
    """The section of a file: its machine, its commands, and a table for each measure."""
    machine = dict(result["machine"])
    peers = ", ".join(f"{peer} {version}" for peer, version in machine.pop("peers").items() if version)
    machine_text = ", ".join(f"{key} {value}" for key, value in machine.items())
    rows, origins = (
        result["rows"],
        dict.fromkeys(f"`{row['command']}` at commit {row['commit']}" for row in result["rows"]),
    )
    # The training step has a file for each preset; its row labels start with the preset.
    model = [rows[0]["row"].split()[0]] if result["benchmark"] == "training_step" else []
    lines = [f"## {', '.join([*model, *place(result)])}", "", f"Machine: {machine_text}. Peers: {peers}.", ""]
    lines += [
        f'<details markdown="1"><summary>Commands</summary>\n\n`benchmarks/results/{name}`\n',
        *(f"- {o}" for o in origins),
    ]
    lines += ["", "</details>", ""]
    shown = [_with_ratios(row, columns(row)) for row in rows]
    headings = list(dict.fromkeys(heading for one in shown for heading in one))
    for heading in headings:
        lines += _table(heading, {row["row"]: one.get(heading, {}) for row, one in zip(rows, shown, strict=True)})
    notes: dict[str, list[str]] = {}
    for row in rows:
        for contender, values in row["contenders"].items():
            if note := values.get("unavailable") or values.get("note"):
                notes.setdefault(f"{contender}: {note}", []).append(row["row"])
    return "\n".join([*lines, *(f"- {', '.join(of)}: {note}" for note, of in notes.items()), ""])


def _with_ratios(row: Mapping[str, Any], shown: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Merge milliseconds and ratios into one column."""
    times, ratios = shown.pop("ms", {}), shown.pop(f"× {row['reference']}", {})
    cells = {name: text + (f" ({ratios[name]})" if name in ratios else "") for name, text in times.items()}
    return {f"ms (× {row['reference']})": cells, **shown} if cells else shown


def _table(heading: str, cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each row of the benchmark, a column for each contender."""
    contenders = list(dict.fromkeys(name for of_row in cells.values() for name in of_row))
    body = [[row, *(of_row.get(name, "") for name in contenders)] for row, of_row in cells.items() if of_row]
    return [markdown_table([heading, *contenders], body), ""]


def papers(results: Path) -> dict[str, str]:
    """Pages by path in docs; deterministic."""
    pages, index = {}, [PAPERS_HEADER]
    for path in sorted(results.glob("papers-*.json")):
        name = path.stem.removeprefix("papers-")
        described = json.loads(path.read_text(encoding="utf-8"))
        tables = [Table(**table) for table in described["tables"]]
        machine = ", ".join(f"{key} {value}" for key, value in described["machine"].items())
        head = f"# {_heading(name)}\n\n`{described['command']}`\n\nMachine: {machine}.\n"
        pages[f"papers/{name}.md"] = "\n".join([head, *(table.markdown() for table in tables)])
        index.append(f"- [{_heading(name)}](papers/{name}.md): {tables[0].title}")
    return pages | {"papers.md": "\n".join(index) + "\n"}


def _heading(name: str) -> str:
    """Heading of a page: pit-tuned-mini-cpu becomes "pit-tuned-mini, cpu"."""
    comparison, _, device = name.rpartition("-")
    return f"{comparison}, {device}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    for name, text in render(options.results).items():
        path = options.docs / name
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} differs from the results; run python -m benchmarks.page")
    if not options.check:
        for name, own in load(options.results).items():
            chart(list(own.values()), options.docs / f"figures/speed-{name}.svg")


if __name__ == "__main__":
    main()
