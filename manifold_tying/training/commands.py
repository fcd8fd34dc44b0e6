"""Parse and run the commands train, ablate, report, sample, convert, export and inspect."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manifold_tying import diagnostics, precision
from manifold_tying.diagnostics import saved_interface
from manifold_tying.huggingface import convert, export, load, save
from manifold_tying.huggingface.checkpoint import load_stock, recorded_mark
from manifold_tying.training.ablation import AblateConfig, ablate, prepare_data, used_by_none
from manifold_tying.training.checkpoint import STATE, checkpoints
from manifold_tying.training.config import Settings, TrainConfig, unused_settings
from manifold_tying.training.evaluate import health_warnings
from manifold_tying.training.hf_model import copy_rest
from manifold_tying.training.loop import train
from manifold_tying.training.processes import Processes, process_group
from manifold_tying.training.progress import progress_bars
from manifold_tying.training.recipes import resolve
from manifold_tying.training.run_data import load_data
from manifold_tying.training.rundir import METRICS, check_out
from manifold_tying.training.sample import sample
from manifold_tying.training.saving import export_model

# tyro shows each section as a group of options.
_SECTIONS = [(kind.__name__.lower(), kind, field(default_factory=kind)) for kind in Settings.__bases__[::-1]]
_Sections = make_dataclass("_Sections", _SECTIONS, frozen=True, kw_only=True)


def parsed(kind: type, command: str, arguments: Sequence[str]) -> Any:
    """Parse the configuration of a command. SystemExit after --help or for a wrong type, ValueError for a wrong value."""
    names = [field.name for field in fields(kind)]
    # tyro would print a ValueError in a box, under a name that the user never wrote, so we validate after it.
    unchecked = make_dataclass(
        kind.__name__,
        [("settings", Annotated[_Sections, tyro.conf.arg(name="")])] if "settings" in names else [],
        bases=(kind,),
        namespace={"__doc__": kind.__doc__, "__post_init__": lambda self: None},
        frozen=True,
        kw_only=True,
    )
    prog, config = f"manifold-tying {command}", (tyro.conf.OmitArgPrefixes,)
    found: Any = tyro.cli(unchecked, prog=prog, args=arguments, config=config)
    values = {name: getattr(found, name) for name in names}
    if "settings" in values:
        values["settings"] = Settings(**{k: v for part in vars(found.settings).values() for k, v in vars(part).items()})
    return kind(**values)


@dataclass(frozen=True)
class ReportConfig:
    """Write report.html with the curves of an ablation or a run, or one page that compares several."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR...]", help_behavior_hint="(required)")
    ]
    """Folders that ablate or train wrote to."""
    out: Path | None = None
    """Folder for report.html; None is DIR, or ./report for several."""


def run_report(config: ReportConfig, console: Console) -> None:
    from manifold_tying.training.report import load_experiments, write_report

    experiment = load_experiments(config.folders)
    out = config.out or (config.folders[0] if len(config.folders) == 1 else Path("report"))
    console.print(f"report: {write_report(experiment, out)}", soft_wrap=True)


@dataclass(frozen=True)
class SampleConfig:
    """Continue a text with the model of a run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder that train wrote to, or one of its checkpoints."""
    prompt: str = ""
    """Beginning of the text; without one a document begins."""
    tokens: int = 200
    """Most tokens to add; the text ends early where the model ends the document."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    seed: int = 0
    """Seed of the draws."""


def run_sample(config: SampleConfig, console: Console) -> None:
    text = sample(config.run, config.prompt, tokens=config.tokens, temperature=config.temperature, seed=config.seed)
    print(text)  # rich would wrap the lines


def run_train(config: TrainConfig, console: Console) -> None:
    ignored = config.settings.changed(tuple(sorted(unused_settings(config.interface, config.settings))))
    with process_group(config.settings):
        processes = Processes.from_settings(config.settings)
        console.quiet = not processes.is_main
        if ignored:
            console.print(f"note: this {config.interface} run does not use {ignored}")
        processes.on_main(lambda: check_out(config))
        load_data(resolve(config), processes, console.print)
        with progress_bars(console, config.settings.steps) as started:
            row = train(config, observer=started(config.interface, 0, 1))
    console.print(f"validation loss {row['val_loss']:.4f} nats per token; written to {config.out}", soft_wrap=True)


def run_ablate(config: AblateConfig, console: Console) -> None:
    budgets = config.budgets()
    if config.dry_run:
        print(*(run.command() for budget in budgets for _, run in budget.runs()), sep="\n")  # rich would wrap the lines
        return
    from manifold_tying.training.report import load_experiments, shown

    rows: list[dict[str, Any]] = []
    with process_group(config.settings):
        processes = Processes.from_settings(config.settings)
        console.quiet = not processes.is_main
        if ignored := config.settings.changed(tuple(sorted(used_by_none(budgets[0])))):
            console.print(f"note: no arm uses {ignored}")
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
    diverged = "its final validation loss is not finite; lower the learning rate, and choose another --out"
    failed = [row | {"failed": row.get("failed", diverged)} for row in rows if row.get("val_loss") is None]
    if failed:
        raise ValueError("; ".join(f"{row['arm']}, seed {row['seed']}, stopped: {row['failed']}" for row in failed))


@dataclass(frozen=True)
class ConvertConfig:
    """Replace the tied tables of a transformers checkpoint by a PIT interface."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a transformers checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write to; tokenizer files are copied."""
    transform: Literal["identity", "head", "embedding", "rotation"] = "head"
    """Initial T: the identity, or T such that head or embedding is unchanged. rotation (Llama-like models) rotates the
    residual stream first; it changes the function only by the unevenness of the final norm's gain."""
    source: Literal["input", "output"] | None = None
    """Which of two untied tables to keep."""


@dataclass(frozen=True)
class ExportConfig:
    """Write a converted checkpoint as a stock, untied one that any program reads, or a run's weights as one file.

    For a run, model.safetensors has the weights of its newest checkpoint.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder that convert wrote, a run's folder, or one of its checkpoints."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write to; tokenizer files are copied."""


def run_convert(config: ConvertConfig, console: Console) -> None:
    if any((config.model / name).is_file() for name in (METRICS, STATE)):
        raise ValueError(f"{config.model} is a run of train or ablate, no transformers checkpoint; use export for runs")
    model = load_stock(config.model)
    _check_out(config.model, config.out)
    if (config.out / "config.json").exists() and recorded_mark(config.out) is None:
        raise ValueError(f"{config.out} already holds a model that is not converted; choose another, or delete it")
    save(convert(model, transform=config.transform, source=config.source), config.out)
    del model  # the summary loads what was written
    copy_rest(config.model, config.out)
    console.print(interface_summary(config.out))


def run_export(config: ExportConfig, console: Console) -> None:
    _check_out(config.model, config.out)
    if found := [name for name in ("config.json", "model.safetensors") if (config.out / name).exists()]:
        raise ValueError(f"{config.out} already holds a model ({', '.join(found)}); choose another, or delete it")
    saved = [config.model] if (config.model / STATE).exists() else checkpoints(config.model)
    if saved or (config.model / METRICS).exists():
        saved_interface(config.model)  # raises before anything is written
        export_model(saved[-1], config.out)
    else:
        export(load(config.model), config.out)
        copy_rest(config.model, config.out)
    console.print(interface_summary(config.out))


def _check_out(model: Path, out: Path) -> None:
    if out.resolve() == model.resolve():
        raise ValueError(f"expected OUT to be another folder than MODEL, got {out} for both")


@dataclass(frozen=True)
class InspectConfig:
    """Show size, tying, conditioning and consistency of a saved model's token interface; nothing is unpickled."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run, one of its checkpoints, or a transformers model, converted or not."""


def run_inspect(config: InspectConfig, console: Console) -> None:
    console.print(interface_summary(config.path))


def interface_summary(path: Path) -> Table:
    numbers, warnings = interface_numbers(path)
    caption = Text("\n".join(f"Warning: {text}." for text in warnings))
    table = Table(title=Text(str(path)), show_header=False, caption=caption, caption_justify="left")
    for row in numbers:
        table.add_row(*row)
    return table


def interface_numbers(path: Path) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(label, value, explanation) for each row of the summary of a saved model's token interface, and warnings."""
    (E, W_out, description), pit = saved_interface(path)
    V, d = E.shape
    squares = [torch.linalg.eigvalsh(precision.gram_in_double(table)).clamp_min(0) for table in (E, W_out.mT)]
    ranks = ", ".join(f"{torch.special.entr(part / part.sum()).sum().exp():.1f}" for part in squares)
    numbers = [
        ("token interface", description, ""),
        ("V x d", f"{V:,} x {d:,}", str(E.dtype).removeprefix("torch.")),
        ("cond(E)", f"{(squares[0][-1] / squares[0][0]).sqrt():.3g}", "largest over smallest singular value"),
        ("effective rank", ranks, f"of E and W_out, of {d}: exp of the entropy of σ² / Σ σ²"),
    ]
    if pit is not None:
        condition = diagnostics.condition_from_factor(pit.cholesky_factor)
        numbers.append(("cond(T)", f"{condition:.3g}", ""))
        numbers.append(("defect", f"{diagnostics.defect(pit.memory.detach()).item():.1e}", "‖ZᵀZ - I‖ / √d"))
    consistency = diagnostics.interface_consistency(E, W_out)
    numbers += [(name, f"{value:.2g}", compared) for name, value, compared in consistency.rows()]
    measured = {"cond_transform": condition, "delta_ti": consistency.delta_ti} if pit is not None else {}
    return numbers, list(health_warnings(measured).values())
