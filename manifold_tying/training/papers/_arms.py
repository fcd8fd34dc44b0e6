"""Arms that a paper compares, trained by ``ablate``, and a table of their losses beside what the paper prints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifold_tying.models import preset
from manifold_tying.training.ablation import AblateConfig, ablate, prepare_data
from manifold_tying.training.arms import run_folder
from manifold_tying.training.config import Settings
from manifold_tying.training.numbers import DASH, fixed, mean, paired_differences
from manifold_tying.training.papers._table import Table, agreement, nats
from manifold_tying.training.progress import Started


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One line of a paper's table."""

    label: str
    """As the paper calls it."""
    spec: str | None
    """As ``ablate --arms`` takes it; None for a line of the paper that is not run here."""
    printed: float | None = None
    """What the paper prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Arms and the rows of their runs."""

    arms: Sequence[Arm]
    rows: Sequence[Mapping[str, Any]]
    folder: Path

    def values(self, arm: Arm, quantity: str) -> dict[int, float]:
        """A quantity of the finished runs of an arm, by seed; nothing where it was not measured."""
        found = {row["seed"]: row.get(quantity) for row in self.rows if row["arm"] == arm.spec}
        return {seed: value for seed, value in found.items() if value is not None}

    def runs(self, arm: Arm) -> dict[int, Path]:
        """The folders of an arm's finished runs, by seed."""
        seeds = sorted(self.values(arm, "val_loss"))
        return {seed: run_folder(self.folder, arm.spec, seed) for seed in seeds} if arm.spec else {}

    def failures(self) -> list[str]:
        """A note for every run that stopped before its end."""
        labels = {arm.spec: arm.label for arm in self.arms}
        return [
            f"{labels[row['arm']]}, seed {row['seed']}, stopped before its end: {row['failed']}"
            for row in self.rows
            if "failed" in row
        ]


def train_arms(
    folder: Path, arms: Sequence[Arm], settings: Settings, seeds: int, started: Started | None = None
) -> Trained:
    """Train what is missing of the arms, on the same data and with the same number of tokens."""
    specs = ",".join(arm.spec for arm in arms if arm.spec is not None)
    config = AblateConfig(out=folder, arms=specs, seeds=seeds, settings=settings)
    prepare_data(config)
    return Trained(arms=arms, rows=ablate(config, started=started), folder=folder)


def size(settings: Settings) -> str:
    """What the runs of a comparison are, for the notes below its tables."""
    shape = preset(settings.preset)
    return (
        f"Here: preset {settings.preset} (d = {shape.hidden_size}, {shape.num_layers} layers, V = {shape.vocab_size:,}), "
        f"{settings.steps * settings.tokens_per_step:,} tokens of {settings.data}"
    )


def loss_table(title: str, trained: Trained, printed: str | None, notes: Sequence[str]) -> Table:
    """Validation loss and perplexity of each arm, the difference to the first one by seed, and the paper's perplexity.

    Args:
        title: of the table.
        trained: the arms.
        printed: the heading of the paper's column; None where no paper has these arms.
        notes: sentences below the table: what differs from the paper.
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
