"""Pretraining from scratch with every arm tuned by the same number of trials: is a trainable memory worth it?"""

from collections.abc import Mapping
from pathlib import Path

from manifold_tying.training._config import Interface, Settings, TrainConfig
from manifold_tying.training._progress import Started
from manifold_tying.training._recipe import resolve
from manifold_tying.training.papers._arms import Arm, loss_table, size, train_arms
from manifold_tying.training.papers._pit import SCRATCH_COLUMN, TRANSPOSE
from manifold_tying.training.papers._table import Table
from manifold_tying.training.papers._throughout import interface_table
from manifold_tying.training.report._numbers import DASH, fixed

Factors = Mapping[str, float]

LABELS: Mapping[Interface, str] = {
    "transpose": TRANSPOSE, "untied": "untied", "pit-frozen": "PIT, Z frozen", "pit-trainable": "PIT, Z trained"
}  # fmt: skip
PRINTED: Mapping[Interface, float] = {"transpose": 17.72, "pit-frozen": 50.17}
# What each trial multiplies the recipe's values with: the body's rate for all, then what else an arm has.
_ALL: tuple[Factors, ...] = ({}, {"lr": 0.5}, {"lr": 2.0}, {"lr": 0.25})
_TABLES: tuple[Factors, ...] = (*_ALL, {"table_std": 1 / 3}, {"lr": 0.5, "table_std": 1 / 3})
TRIALS: Mapping[Interface, tuple[Factors, ...]] = {
    "transpose": _TABLES,
    "untied": _TABLES,
    "pit-frozen": (*_ALL, {"transform_lr": 0.5}, {"transform_lr": 2.0}),
    "pit-trainable": (*_ALL, {"transform_lr": 0.5}, {"memory_lr": 2 / 3}),
}
OWN: Mapping[Interface, tuple[str, ...]] = {
    "transpose": ("lr", "table_std"),
    "untied": ("lr", "table_std"),
    "pit-frozen": ("lr", "transform_lr"),
    "pit-trainable": ("lr", "transform_lr", "memory_lr"),
}


def tuned(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """All trials with seed 0, then the best one of each arm with every seed."""
    specs = {interface: trial_specs(interface, settings) for interface in LABELS}
    everything = [Arm(label=LABELS[interface], spec=spec) for interface in specs for spec in specs[interface]]
    tried = train_arms(out, everything, settings, 1, started)
    losses = {arm.spec: tried.values(arm, "val_loss").get(0) for arm in everything}
    body, best = [], []
    for interface, of_arm in specs.items():
        finished = [spec for spec in of_arm if losses[spec] is not None]
        chosen = min(finished, key=lambda spec: losses[spec] or 0.0, default=None)
        if chosen is not None:
            best.append(Arm(label=LABELS[interface], spec=chosen, printed=PRINTED.get(interface)))
        for spec in of_arm:
            loss = losses[spec]
            cell = DASH if loss is None else fixed(loss, 3)
            body.append([LABELS[interface], f"`{spec}`", cell, "yes" if spec == chosen else ""])
    trials = Table(
        title="The trials, seed 0",
        head=["arm", "settings", "loss (nats/token)", "chosen"],
        body=body,
        notes=["What is not named has the recipe's value (docs/learning-rates.md).", *tried.failures()],
    )
    trained = train_arms(out, best, settings, seeds, started)
    notes = [
        f"{size(settings)}, validation; the paper: Llama-0.3B, FineWeb-Edu, training loss, Z frozen and used as it is.",
        "Seed 0 also chose the settings, for every arm among the same number of trials.",
    ]
    title = "From scratch, every arm at the best of its trials"
    return [
        loss_table(title, trained, SCRATCH_COLUMN, notes),
        interface_table("The interface during training", trained),
        trials,
    ]


def trial_specs(interface: Interface, settings: Settings) -> list[str]:
    """The trials of an arm as ``ablate --arms`` takes them; the first is the recipe's own."""
    resolved = resolve(TrainConfig(out=Path(), interface=interface, settings=settings)).settings
    usual = {name: float(getattr(resolved, name)) for name in OWN[interface]}
    return [
        "+".join([interface, *(f"{name}={usual[name] * factors.get(name, 1.0):.4g}" for name in usual if factors)])
        for factors in TRIALS[interface]
    ]
