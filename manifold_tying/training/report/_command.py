"""manifold-tying report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from manifold_tying.training.report._comparison import load_experiments
from manifold_tying.training.report._page import write_report


@dataclass(frozen=True)
class ReportConfig:
    """Draw the curves and write report.html of an ablation or a run; of several, one page that compares them."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR...]", help_behavior_hint="(required)")
    ]
    """Folders that ablate or train wrote to."""
    out: Path | None = None
    """Folder for report.html and the figures; None is DIR itself where there is one, and ./report for several."""


def run_report(config: ReportConfig, console: Console) -> None:
    experiment = load_experiments(config.folders)
    out = config.out or (config.folders[0] if len(config.folders) == 1 else Path("report"))
    console.print(f"report: {write_report(experiment, out)}", soft_wrap=True)
