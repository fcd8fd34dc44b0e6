"""manifold-tying train | ablate | report: the runs, with what is printed around them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from manifold_tying.training._ablation import AblateConfig, ablate, commands, prepare_data
from manifold_tying.training._processes import Processes, process_group
from manifold_tying.training._progress import progress_bars
from manifold_tying.training.config import TrainConfig
from manifold_tying.training.loop import load_data, train
from manifold_tying.training.recipes import resolve

DIVERGED = "the validation loss at its end is not finite; lower the learning rate, and choose another --out"


@dataclass(frozen=True)
class ReportConfig:
    """Draw the curves and write report.html of an ablation or a run; of several, one page that compares them."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR...]", help_behavior_hint="(required)")
    ]
    """Folders that ablate or train wrote to."""
    out: Path | None = None
    """Folder for report.html; None is DIR itself where there is one, and ./report for several."""


def run_report(config: ReportConfig, console: Console) -> None:
    from manifold_tying.training.report import load_experiments, write_report

    experiment = load_experiments(config.folders)
    out = config.out or (config.folders[0] if len(config.folders) == 1 else Path("report"))
    console.print(f"report: {write_report(experiment, out)}", soft_wrap=True)


def run_train(config: TrainConfig, console: Console) -> None:
    with process_group(config.settings):
        processes = Processes.from_settings(config.settings)
        console.quiet = not processes.is_main
        load_data(resolve(config), processes, console.print)
        with progress_bars(console, config.settings.steps) as started:
            row = train(config, observer=started(config.interface, 0, 1))
    console.print(f"validation loss {row['val_loss']:.4f} nats per token; written to {config.out}", soft_wrap=True)


def run_ablate(config: AblateConfig, console: Console) -> None:
    budgets = config.budgets()
    if config.dry_run:
        for command in (command for budget in budgets for command in commands(budget)):
            print(command)  # rich would break the lines
        return
    from manifold_tying.training.report import load_experiments, shown

    rows: list[dict[str, Any]] = []
    with process_group(config.settings):
        processes = Processes.from_settings(config.settings)
        console.quiet = not processes.is_main
        for budget in budgets:
            prepare_data(budget, console.print)
            with progress_bars(console, budget.settings.steps) as started:
                found = ablate(budget, started=started)
            if processes.is_main and any("failed" not in row for row in found):
                for part in shown(load_experiments([budget.out])):
                    console.print(part)
                run_report(ReportConfig((budget.out,)), console)
            rows += found
    if not processes.is_main:
        return
    if len(budgets) > 1 and all("failed" not in row for row in rows):
        run_report(ReportConfig(tuple(budget.out for budget in budgets), config.out), console)
    failed = [row | {"failed": row.get("failed", DIVERGED)} for row in rows if row.get("val_loss") is None]
    if failed:
        raise ValueError("; ".join(f"{row['arm']}, seed {row['seed']}, stopped: {row['failed']}" for row in failed))
