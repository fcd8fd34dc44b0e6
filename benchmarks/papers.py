"""The pages of the papers' comparisons: every benchmarks/results/papers-*.json, as reproduce wrote it."""

import json
from pathlib import Path

from experiments.comparison import Table

HEADER = """# The papers' comparisons

Written by `python -m benchmarks.page` from what `manifold-tying reproduce` left (its `tables.json`, in `benchmarks/results` as
papers-NAME.json); do not edit. Each page names its command, which repeats it at any size: `--preset`, `--tokens`, `--seeds`,
`--data`, `--device`.

Means over seeds ± the sample standard deviation; losses in nats per token on held-out text. Models and corpora here are
thousands of times smaller than the papers'. So a difference to their tables says what happens at this size and nothing about
theirs. Where arms are within the spread, their order says nothing. Learning rates are those of
[learning-rates.md](learning-rates.md) for every arm, unless a page lists its trials.
"""


def render(results: Path) -> dict[str, str]:
    """The pages by their path in docs, the same for the same files."""
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
    """pit-tuned-mini-cpu is pit-tuned-mini, cpu: a comparison may be there at several sizes."""
    comparison, _, device = name.rpartition("-")
    return f"{comparison}, {device}"
