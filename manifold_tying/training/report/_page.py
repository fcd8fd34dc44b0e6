"""The page: one self-contained HTML file out of page.html, report.css and the sections."""

from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from manifold_tying.training._files import write_whole
from manifold_tying.training.report._curves import drawn_figures
from manifold_tying.training.report._experiment import Experiment, arm_names, seeds_of
from manifold_tying.training.report._reading import load_experiment
from manifold_tying.training.report._sections import (
    figures_section,
    findings_section,
    machine_section,
    results_section,
    settings_section,
    words_section,
)


def write_report(out: str | Path) -> Path:
    """Read the experiment in a folder and write ``report.html`` into it."""
    return write_whole(Path(out) / "report.html", page(load_experiment(out)).encode())


def page(experiment: Experiment) -> str:
    """The whole page as text. Only its sections put data into markup, and they escape it."""
    figures, empty = drawn_figures(experiment)
    sections = (
        findings_section(experiment.rows, experiment.failures),
        results_section(experiment.rows),
        figures_section(figures, empty),
        settings_section(experiment),
        machine_section(experiment),
        words_section(),
    )
    return Template(_shipped("page.html")).substitute(
        title=escape(_title(experiment)),
        subtitle=escape(_subtitle(experiment)),
        style=_shipped("report.css"),
        sections="\n".join(sections),
    )


def _title(experiment: Experiment) -> str:
    if source := experiment.settings.get("init_from"):
        return f"Ablation, continued from {source}"
    preset = experiment.settings.get("preset")
    return f"Ablation, preset {preset}" if preset else "Ablation"


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
