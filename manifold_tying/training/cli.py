"""The command line: manifold-tying train | ablate | reproduce | report | convert | export | inspect."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from manifold_tying.training._ablation import AblateConfig, ablate, commands, prepare_data
from manifold_tying.training._arguments import parsed
from manifold_tying.training._config import TrainConfig
from manifold_tying.training._huggingface import ConvertConfig, ExportConfig, run_convert, run_export
from manifold_tying.training._inspect import InspectConfig, run_inspect
from manifold_tying.training._loop import train
from manifold_tying.training._processes import Processes, process_group
from manifold_tying.training._progress import progress_bars
from manifold_tying.training._recipe import resolve
from manifold_tying.training._run_data import load_data_together
from manifold_tying.training.papers import ReproduceConfig, reproduce
from manifold_tying.training.report import load_experiments, shown, write_report

DIVERGED = "the validation loss at its end is not finite; lower the learning rate, and choose another --out"


@dataclass(frozen=True)
class ReportConfig:
    """Draw the curves and write report.html of an ablation or a run; of several, one page that compares them."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR...]", help_behavior_hint="(required)")
    ]
    """Folders that ablate or train wrote to."""
    out: Path | None = None
    """Folder for report.html and the figures; None is DIR itself where there is one, and ./report for several."""


def _console(*, stderr: bool = False) -> Console:
    """For text with names that users chose, which are never markup: "[/x]" would be an error, "[final]" would vanish."""
    return Console(stderr=stderr, markup=False, emoji=False)


def run_train(config: TrainConfig, console: Console) -> None:
    with process_group(config.settings):
        processes = Processes.of(config.settings)
        console.quiet = not processes.writes
        load_data_together(resolve(config), processes, console.print)
        with progress_bars(console, config.settings.steps) as started:
            row = train(config, observer=started(config.interface, 0, 1))
    console.print(f"validation loss {row['val_loss']:.4f} nats per token; written to {config.out}", soft_wrap=True)


def run_ablate(config: AblateConfig, console: Console) -> None:
    budgets = config.budgets()
    if config.dry_run:
        for command in (command for budget in budgets for command in commands(budget)):
            print(command)  # rich would break the lines
        return
    rows: list[dict[str, Any]] = []
    with process_group(config.settings):
        processes = Processes.of(config.settings)
        console.quiet = not processes.writes
        for budget in budgets:
            prepare_data(budget, console.print)
            with progress_bars(console, budget.settings.steps) as started:
                found = ablate(budget, started=started)
            if processes.writes and any("failed" not in row for row in found):
                for part in shown(load_experiments([budget.out])):
                    console.print(part)
                run_report(ReportConfig((budget.out,)), console)
            rows += found
    if not processes.writes:
        return
    if len(budgets) > 1 and all("failed" not in row for row in rows):
        run_report(ReportConfig(tuple(budget.out for budget in budgets), config.out), console)
    failed = [row | {"failed": row.get("failed", DIVERGED)} for row in rows if row.get("val_loss") is None]
    if failed:
        raise ValueError("; ".join(f"{row['arm']}, seed {row['seed']}, stopped: {row['failed']}" for row in failed))


def run_reproduce(config: ReproduceConfig, console: Console) -> None:
    with progress_bars(console, config.settings().steps) as started:
        tables = reproduce(config, started=started)
    for table in tables:
        console.print(table.terminal())
    console.print(f"tables: {config.out / 'tables.md'}", soft_wrap=True)


def run_report(config: ReportConfig, console: Console) -> None:
    experiment = load_experiments(config.folders)
    out = config.out or (config.folders[0] if len(config.folders) == 1 else Path("report"))
    console.print(f"report: {write_report(experiment, out)}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run it; what the user can mend (ValueError, OSError, a package) is printed, exit status 2."""
    commands: dict[str, tuple[type, Callable[[Any, Console], None]]] = {
        "train": (TrainConfig, run_train),
        "ablate": (AblateConfig, run_ablate),
        "reproduce": (ReproduceConfig, run_reproduce),
        "report": (ReportConfig, run_report),
        "convert": (ConvertConfig, run_convert),
        "export": (ExportConfig, run_export),
        "inspect": (InspectConfig, run_inspect),
    }
    runs = dict(commands.values())
    try:
        config = parsed({name: kind for name, (kind, _) in commands.items()}, arguments)
        runs[type(config)](config, _console())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True).print(
            f"error: {error}", style="bold red", highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
