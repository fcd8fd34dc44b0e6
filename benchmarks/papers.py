"""Write the pages of the papers' comparisons from benchmarks/results/papers-*.json, the output of reproduce."""

import json
from pathlib import Path

from experiments.comparison import Table

HEADER = """# The papers' comparisons

Written by `python -m benchmarks.page` from the `tables.json` of `manifold-tying reproduce` (papers-NAME.json in
`benchmarks/results`); do not edit. Each page names its command. To repeat it at another size, change `--preset`, `--tokens`,
`--seeds`, `--data` or `--device`.

Values are means over seeds ± the sample standard deviation; losses are in nats per token on held-out text. Models and corpora
here are thousands of times smaller than the papers'. So a difference from a paper's table is a result at this size only. If
arms differ by less than the spread, their order means nothing. Every arm has the learning rates of
[learning-rates.md](learning-rates.md), unless a page lists its trials.
"""


def render(results: Path) -> dict[str, str]:
    """Pages by path in docs; deterministic."""
    pages, index = {}, [HEADER]
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
