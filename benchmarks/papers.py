"""The page of the papers' comparisons: every benchmarks/results/papers-*.json, as reproduce wrote it."""

import json
from pathlib import Path

from manifold_tying.training.papers.comparison import Table

HEADER = """# The papers' comparisons

Written by `python -m benchmarks.page` from what `manifold-tying reproduce` left (its `tables.json`, in
`benchmarks/results` as papers-NAME.json); do not edit. Each section names its command, which does it
again, at any size: `--preset`, `--tokens`, `--seeds`, `--data`, `--device`.

Means over seeds ± the sample standard deviation; losses in nats per token on held-out text. Models and corpora here are
thousands of times smaller than the papers', so a difference to their tables says what happens at this size and nothing
about theirs, and where arms are within the spread their order says nothing at all. Learning rates are those of
[learning-rates.md](learning-rates.md) for every arm, but where a section lists its trials.
"""


def render(results: Path) -> str:
    """The page, the same for the same files."""
    sections = [HEADER]
    for path in sorted(results.glob("papers-*.json")):
        described = json.loads(path.read_text(encoding="utf-8"))
        machine = ", ".join(f"{key} {value}" for key, value in described["machine"].items())
        sections.append(f"## {_heading(path)}\n\n`{described['command']}`\n\nMachine: {machine}.\n")
        sections += [Table(**table).markdown() for table in described["tables"]]
    return "\n".join(sections)


def _heading(path: Path) -> str:
    """papers-pit-tuned-mini-cpu.json is pit-tuned-mini, cpu: a comparison may be there at several sizes."""
    name, _, device = path.stem.removeprefix("papers-").rpartition("-")
    return f"{name}, {device}"
