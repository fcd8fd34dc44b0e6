"""The command line: manifold-tying train | ablate | report."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

try:
    import tyro
    from rich.console import Console
except ModuleNotFoundError as error:  # pragma: no cover - needs an environment without the extra
    sys.exit(f"{error}: the command line needs more packages; pip install 'manifold-tying[train]'")

from manifold_tying.training._ablation import AblateConfig, ablate, prepare_data
from manifold_tying.training._config import TrainConfig
from manifold_tying.training._loop import load_data, train
from manifold_tying.training._progress import progress_bars
from manifold_tying.training._recipe import resolve
from manifold_tying.training.report import findings, load_experiment, plot_curves, summary_table, write_report


@dataclass(frozen=True)
class ReportConfig:
    """Draw the curves and write report.html of an experiment again."""

    out: Annotated[Path, tyro.conf.Positional]
    """Folder that ablate wrote to."""


def run_train(config: TrainConfig, console: Console) -> None:
    load_data(resolve(config), console.print)
    with progress_bars(console, config.settings.steps) as started:
        row = train(config, observer=started(config.interface, 0, 1))
    console.print(f"validation loss {row['val_loss']:.4f} nats per token; written to {config.out}")


def run_ablate(config: AblateConfig, console: Console) -> None:
    prepare_data(config, console.print)
    with progress_bars(console, config.settings.steps) as started:
        rows = ablate(config, started=started)
    console.print(summary_table(rows))
    for line in findings(rows):
        console.print(line)
    run_report(ReportConfig(config.out), console)


def run_report(config: ReportConfig, console: Console) -> None:
    plot_curves(load_experiment(config.out), config.out)
    console.print(f"report: {write_report(config.out)}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run it; a ValueError is printed as the error that it is, exit status 2."""
    config = tyro.extras.subcommand_cli_from_dict(
        {"train": TrainConfig, "ablate": AblateConfig, "report": ReportConfig},
        prog="manifold-tying",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    console = Console(soft_wrap=False)
    try:
        if isinstance(config, TrainConfig):
            run_train(config, console)
        elif isinstance(config, AblateConfig):
            run_ablate(config, console)
        else:
            run_report(config, console)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", highlight=False, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
