"""Train the arms that a paper compares, and make tables of their losses next to the paper's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.text import Text

from manifold_tying.models import preset
from manifold_tying.training.ablation import AblateConfig, ablate, prepare_data
from manifold_tying.training.arms import run_folder
from manifold_tying.training.config import Settings
from manifold_tying.training.numbers import DASH, fixed, mean, paired_differences, significant, summarize
from manifold_tying.training.progress import Started
from manifold_tying.training.report.load import read_lines
from manifold_tying.training.rundir import METRICS


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table of text cells."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Markdown, with the notes as a list below."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"### {self.title}\n\n{markdown_table(self.head, self.body)}\n" + (f"\n{notes}" if notes else "")

    def terminal(self) -> rich.table.Table:
        """A rich table for the terminal."""
        table = rich.table.Table(box=box.SIMPLE_HEAD, title=Text(self.title), caption=Text("\n".join(self.notes)))
        for place, heading in enumerate(self.head):
            table.add_column(Text(heading), justify="right" if place else "left")
        for line in self.body:
            table.add_row(*map(Text, line))
        return table


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the columns after the first ``left`` are right-aligned."""
    lines = [head, ["---" if i < left else "---:" for i in range(len(head))], *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def nats(values: Sequence[float], *, signed: bool = False) -> str:
    """Mean and sample standard deviation over seeds, nats per token."""
    return _with_spread(values, 3, signed=signed)


def scientific(values: Sequence[float]) -> str:
    """Mean over seeds to two digits, for numbers of different magnitudes."""
    summary = summarize(values)
    return DASH if summary is None else significant(summary.mean, 2)


def share(values: Sequence[float]) -> str:
    """Mean and sample standard deviation of shares, in per cent."""
    return _with_spread([100 * value for value in values], 1)


def _with_spread(values: Sequence[float], decimals: int, *, signed: bool = False) -> str:
    summary = summarize(values)
    if summary is None:
        return DASH
    spread = "" if summary.sd is None else f" ± {fixed(summary.sd, decimals)}"
    return fixed(summary.mean, decimals, signed=signed) + spread


def agreement(ours: Mapping[str, float], printed: Mapping[str, float]) -> str | None:
    """Spearman's rank correlation between our order of arms and the paper's; None for fewer than three common arms."""
    both = [arm for arm in ours if arm in printed]
    if len(both) < 3:
        return None
    from scipy.stats import spearmanr  # takes longer to import than the rest of the package

    rank = spearmanr([ours[arm] for arm in both], [printed[arm] for arm in both]).statistic
    return f"Order of the arms against the paper's: Spearman's ρ = {fixed(float(rank), 2)} over {len(both)} arms."


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One line of a paper's table."""

    label: str
    """Name in the paper."""
    spec: str | None
    """Arm for ``ablate --arms``; None for one that is not run here."""
    printed: float | None = None
    """The paper's value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Arms and the rows of their runs."""

    arms: Sequence[Arm]
    rows: Sequence[Mapping[str, Any]]
    folder: Path

    def values(self, arm: Arm, quantity: str) -> dict[int, float]:
        """A quantity of an arm's finished runs by seed, without runs that lack it."""
        found = {row["seed"]: row.get(quantity) for row in self.rows if row["arm"] == arm.spec}
        return {seed: value for seed, value in found.items() if value is not None}

    def runs(self, arm: Arm) -> dict[int, Path]:
        """The folders of an arm's finished runs, by seed."""
        seeds = sorted(self.values(arm, "val_loss"))
        return {seed: run_folder(self.folder, arm.spec, seed) for seed in seeds} if arm.spec else {}

    def failures(self) -> list[str]:
        """A note for each run that stopped early."""
        labels = {arm.spec: arm.label for arm in self.arms}
        return [
            f"{labels[row['arm']]}, seed {row['seed']}, stopped before its end: {row['failed']}"
            for row in self.rows
            if "failed" in row
        ]


def train_arms(
    folder: Path, arms: Sequence[Arm], settings: Settings, seeds: int, started: Started | None = None
) -> Trained:
    """Train the missing runs, all on the same data and number of tokens."""
    specs = ",".join(arm.spec for arm in arms if arm.spec is not None)
    config = AblateConfig(out=folder, arms=specs, seeds=seeds, settings=settings)
    prepare_data(config)
    return Trained(arms=arms, rows=ablate(config, started=started), folder=folder)


def size(settings: Settings) -> str:
    """Model, tokens and data of the runs, for the notes."""
    shape = preset(settings.preset)
    return (
        f"Here: preset {settings.preset} (d = {shape.hidden_size}, {shape.num_layers} layers, V = {shape.vocab_size:,}), "
        f"{settings.steps * settings.tokens_per_step:,} tokens of {settings.data}"
    )


def loss_table(title: str, trained: Trained, printed: str | None, notes: Sequence[str]) -> Table:
    """Validation loss and perplexity of each arm, the paired difference to the first arm, and the paper's perplexity.

    Args:
        title: title of the table.
        trained: the arms.
        printed: heading of the paper's column; None if no paper has these arms.
        notes: sentences below the table, such as differences from the paper.
    """
    reference = trained.arms[0]
    baseline = trained.values(reference, "val_loss")
    body, ours = [], {}
    for arm in trained.arms:
        losses = trained.values(arm, "val_loss")
        if losses:
            ours[arm.label] = mean(list(losses.values()))
        difference = [] if arm is reference else paired_differences(losses, baseline)
        parameters = list(trained.values(arm, "trainable_parameters").values())
        body.append(
            [
                arm.label,
                nats(list(losses.values())),
                nats(difference, signed=True) if difference else "",
                fixed(math.exp(ours[arm.label]), 1) if losses else DASH,
                fixed(parameters[0] / 1e6, 2) if parameters else DASH,
                *([] if printed is None else [DASH if arm.printed is None else fixed(arm.printed, 2)]),
            ]
        )
    order = agreement(ours, {arm.label: arm.printed for arm in trained.arms if arm.printed is not None})
    head = ["arm", "loss (nats/token)", f"against {reference.label}", "perplexity", "trainable (M)"]
    head += [] if printed is None else [printed]
    return Table(title=title, head=head, body=body, notes=[*([order] if order else []), *trained.failures(), *notes])


QUANTITIES = ("delta_ti", "defect", "cond_transform")


def interface_table(title: str, trained: Trained) -> Table:
    """Largest ΔTI, defect and condition number of each PIT arm over all evaluations and seeds."""
    body = []
    for arm in trained.arms:
        if (arm.spec or "").startswith("pit"):
            largest = [max(_measured(trained, arm, name), default=None) for name in QUANTITIES]
            body.append([arm.label, *(DASH if value is None else significant(value, 2) for value in largest)])
    head = ["arm", "largest ‖W_out E − I‖", "largest ‖ZᵀZ − I‖ / √d", "largest cond(T)"]
    return Table(
        title=title, head=head, body=body, notes=["Over all seeds and all evaluations, the last one included."]
    )


def _measured(trained: Trained, arm: Arm, quantity: str) -> Iterator[float]:
    for run in trained.runs(arm).values():
        for line in read_lines(run / METRICS, required=("step",), optional=(quantity,)):
            if line.get(quantity) is not None:
                yield line[quantity]
