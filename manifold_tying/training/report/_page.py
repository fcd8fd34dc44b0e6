"""The page: one self-contained HTML file out of page.html, report.css, report.js and the sections."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from manifold_tying.training._files import write_whole
from manifold_tying.training.report._comparison import comparable
from manifold_tying.training.report._curves import Plot, drawn_figures, write_figures
from manifold_tying.training.report._drawing import Drawn
from manifold_tying.training.report._experiment import Experiment, arm_names, seeds_of
from manifold_tying.training.report._figures import figures_section
from manifold_tying.training.report._palette import COLOURS, ON_DARK, looks, variables
from manifold_tying.training.report._sections import (
    findings_section,
    machine_section,
    results_section,
    settings_section,
    words_section,
)


def write_report(experiment: Experiment, out: str | Path) -> Path:
    """Write ``report.html`` and the figures as PNG into a folder, which is made where there is none."""
    figures, empty = drawn_figures(experiment)
    written = page(experiment, figures, empty).encode()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_figures(figures, out)
    return write_whole(out / "report.html", written)


def page(experiment: Experiment, figures: Sequence[Drawn], empty: Sequence[Plot]) -> str:
    """The whole page as text. Only its sections put data into markup, and they escape it."""
    groups = comparable(experiment)
    sections = (
        findings_section(experiment, groups),
        results_section(experiment.rows, groups),
        figures_section(figures, empty, looks(arm_names(experiment.rows))),
        settings_section(experiment),
        machine_section(experiment),
        words_section(),
    )
    script = _shipped("report.js")
    return Template(_shipped("page.html")).substitute(
        title=escape(_title(experiment)),
        subtitle=escape(_subtitle(experiment)),
        style=_shipped("report.css"),
        colours=variables(COLOURS),
        colours_on_dark=variables(ON_DARK),
        sections="\n".join(sections),
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _title(experiment: Experiment) -> str:
    if len(experiment.sources) > 1:
        return f"Comparison of {len(experiment.sources)} folders"
    what = {"ablation": "Ablation", "run": "Training run"}[experiment.sources[0].kind]
    if source := experiment.settings.get("init_from"):
        return f"{what}, continued from {source}"
    preset = experiment.settings.get("preset")
    return f"{what}, preset {preset}" if preset else what


def _subtitle(experiment: Experiment) -> str:
    arms = arm_names(experiment.rows)
    counts = sorted({len(seeds_of(experiment.rows, arm)) for arm in arms})
    tokens = sorted({row["tokens"] for row in experiment.rows})
    seeds = _range(counts) + (" seed" if counts == [1] else " seeds") + " per arm"
    parts = [
        f"{len(arms)} {'arm' if len(arms) == 1 else 'arms'}: {', '.join(arms)}",
        seeds,
        f"{_range(tokens)} tokens per run",
    ]
    return " · ".join(parts)


def _range(values: list[int] | list[float]) -> str:
    low, high = f"{values[0]:,.0f}", f"{values[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"


def _shipped(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
