"""Render the report: one self-contained HTML file from page.html, page.css, page.js, plotly.js and the figures."""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from plotly.offline import get_plotlyjs

from manifold_tying.training.files import write_atomic, writing_to
from manifold_tying.training.numbers import DASH
from manifold_tying.training.report import figures as plots
from manifold_tying.training.report.comparison import APART, comparable, differences
from manifold_tying.training.report.findings import all_findings
from manifold_tying.training.report.load import Experiment, arm_names
from manifold_tying.training.report.tables import Cell, Table, results

MARK = b'<meta name="generator" content="manifold-tying report">'  # identifies our reports
# The hues of plots.COLOURS, each with a contrast of at least 6 to a dark page
ON_DARK = ("#4A9FE3", "#F27B35", "#2DBF93", "#E295C1", "#F0B840", "#9AD6F7", "#B4BBC5")
COLOUR_NAMES = ("arms", "paper", "raised", "ink", "quiet", "rule")
LIGHT = (plots.COLOURS, "#ffffff", "#f6f7f9", "#1f2328", "#5b6470", "#d8dee4")
DARK = (ON_DARK, "#14171c", "#1c2027", "#e4e7eb", "#9aa4b0", "#333a44")
THEMES = {name: dict(zip(COLOUR_NAMES, of, strict=True)) for name, of in (("light", LIGHT), ("dark", DARK))}


def write_report(experiment: Experiment, out: str | Path) -> Path:
    """Write ``OUT/report.html``; raises ValueError rather than overwrite a file that is not a report."""
    written, path = page(experiment).encode(), Path(out) / "report.html"
    if path.exists() and not (path.is_file() and MARK in path.read_bytes()[:4096]):
        raise ValueError(f"{path} is not a report of manifold-tying; move it, or choose another folder with --out")
    with writing_to(path.parent):
        return write_atomic(path, written)


def page(experiment: Experiment) -> str:
    arms, groups = arm_names(experiment.rows), comparable(experiment)
    window = plots.smoothing_window(experiment)
    found, missing = plots.drawn(experiment)
    figures = [
        {
            "title": figure.title,
            "plot": plots.plot(figure, frame, arms),
            "weights": [weight for weight in frame.weight.unique() if weight],
            "caption": plots.caption(figure, frame, arms, window),
            "alternative": plots.alternative(figure, frame),
            "table": plots.values(figure, frame),
        }
        for figure, frame in found
    ]
    plotly, packed = _plotly()
    script = _shipped("page.js")
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, **blocks)
    environment.filters |= {"words": lambda key: key.replace("_", " "), "shown": text_of, "uri": quote}
    return environment.from_string(_shipped("page.html")).render(
        title=_title(experiment), subtitle=_subtitle(experiment), apart=differences(experiment), apart_title=APART,
        findings=all_findings(experiment, groups), results=results(experiment.rows, groups), settings=experiment.settings,
        by_arm=_settings(experiment), waiting=[arm for arm in experiment.arms if arm not in arms], sources=experiment.sources,
        arms=arms, figures=figures, missing=missing, css=_shipped("page.css"), themes=THEMES, script=script, plotly=packed,
        hashes=[_sha256(script), _sha256(plotly)], mark=MARK.decode(),
    )  # fmt: skip


def text_of(value: Any) -> str:
    """A setting as text: a dash for None, six digits for a float, commas between nested values."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {text_of(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return DASH if value is None else value if isinstance(value, str) else json.dumps(value)


def _settings(experiment: Experiment) -> Table:
    """The settings of each arm, learning rates first."""
    keys = list(dict.fromkeys(key for own in experiment.arms.values() for key in own))
    keys = [key for key in keys if any(own.get(key) is not None for own in experiment.arms.values())]
    keys.sort(key=lambda key: key != "lr" and not key.endswith("_lr"))  # stable: keeps the order of the others
    rows = [(key.replace("_", " "), [_setting(own.get(key)) for own in experiment.arms.values()]) for key in keys]
    return Table("setting", [(arm, "") for arm in experiment.arms], rows)


def _setting(value: Any) -> Cell:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return Cell(text_of(value), value=value if number else None)


def _title(experiment: Experiment) -> str:
    if len(experiment.sources) > 1:
        return f"Comparison of {len(experiment.sources)} folders"
    what = {"ablation": "Ablation", "run": "Training run"}[experiment.sources[0].kind]
    if source := experiment.settings.get("init_from"):
        return f"{what}, continued from {source}"
    preset = experiment.settings.get("preset")
    return f"{what}, preset {preset}" if preset else what


def _subtitle(experiment: Experiment) -> str:
    arms = [row["arm"] for row in experiment.rows]
    names, counts = list(dict.fromkeys(arms)), sorted({arms.count(arm) for arm in arms})
    tokens = sorted({row["tokens"] for row in experiment.rows})
    number = f"{len(names)} {'arm' if len(names) == 1 else 'arms'}: {', '.join(names)}"
    seeds = f"{_range(counts)} {'seed' if counts == [1] else 'seeds'} per arm"
    return f"{number} · {seeds} · {_range(tokens)} tokens per run"


def _range(values: Sequence[float]) -> str:
    low, high = f"{values[0]:,.0f}", f"{values[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, and the same as base64 of its gzip, a third of the size."""
    script = get_plotlyjs()
    return script, base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _shipped(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
