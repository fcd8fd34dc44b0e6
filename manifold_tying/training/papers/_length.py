"""PIT against plain tables over 1,800 steps, ten times the length of the default ablation."""

from pathlib import Path

from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.papers._arms import Arm, loss_table, size, train_arms
from manifold_tying.training.papers._pit import TRANSPOSE
from manifold_tying.training.papers._table import Table
from manifold_tying.training.papers._throughout import interface_table
from manifold_tying.training.progress import Started
from manifold_tying.training.recipes import resolve

TOKENS = 1_843_200


def length(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """The PIT arms by their recipes, and plain tables at the best of their trials at this length (docs/learning-rates.md).

    Transpose tying does best with the free table's rates, untied tables at the body's rate and a third of the usual std.
    """
    free = resolve(TrainConfig(out=Path(), interface="pit-free", settings=settings)).settings
    assert free.table_std is not None, "the settings are resolved"
    rates = f"lr={free.lr:.4g}+table_lr={free.table_lr:.4g}+table_slows_after={free.table_slows_after}"
    small = f"lr={free.lr:.4g}+table_std={free.table_std / 3:.4g}"
    arms = [
        Arm(label=TRANSPOSE, spec=f"transpose+{rates}"),
        Arm(label=f"{TRANSPOSE}, embeddings normalized", spec=f"transpose+embedding_norm=true+{rates}"),
        Arm(label="untied, embeddings normalized", spec=f"untied+embedding_norm=true+{small}"),
        Arm(label="PIT, Z trained", spec="pit-trainable"),
        Arm(label="PIT, free table", spec="pit-free"),
    ]
    trained = train_arms(out, arms, settings, seeds, started)
    notes = [f"{size(settings)}, validation. Plain tables at the best of their trials: {rates}; untied {small}."]
    return [
        loss_table("At length", trained, None, notes),
        interface_table("The interface during training", trained),
    ]
