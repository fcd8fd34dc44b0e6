"""What a trainable memory needs from scratch: one ingredient of the recipe removed at a time."""

from pathlib import Path

from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.papers._arms import Arm, loss_table, size, train_arms
from manifold_tying.training.papers._pit import TRANSPOSE
from manifold_tying.training.papers._table import Table
from manifold_tying.training.papers._throughout import interface_table
from manifold_tying.training.progress import Started
from manifold_tying.training.recipes import resolve
from manifold_tying.training.sections import Interface

PIT: Interface = "pit-trainable"


def ingredients(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """PIT with a trained Z as the recipe has it, without each of its parts, and plain tables with the part they can have."""
    trained = train_arms(out, ingredient_arms(settings), settings, seeds, started)
    notes = [f"{size(settings)}, validation. All else is the recipe's and was not tuned again."]
    title = "One ingredient removed at a time"
    return [loss_table(title, trained, None, notes), interface_table("The interface during training", trained)]


def ingredient_arms(settings: Settings) -> list[Arm]:
    """The recipe's arm first, then what is taken from it."""
    resolved = resolve(TrainConfig(out=Path(), interface=PIT, settings=settings)).settings
    lr, memory = float(resolved.lr or 0.0), float(resolved.memory_lr or 0.0)
    removed = {
        "embeddings not normalized": "embedding_norm=false",
        "T's off-diagonal entries at T's rate": "off_diagonal_scale=1",
        "T at the body's rate": f"transform_lr={lr:.4g}",
        "Z at the body's rate": f"memory_lr={lr:.4g}",
        "Z at four times its rate": f"memory_lr={4 * memory:.4g}",
        "Z at a quarter of its rate": f"memory_lr={memory / 4:.4g}",
        "Z's rate does not slow down": "memory_slows_after=0",
        "second moment by row": "second_moment=row",
        "second moment of the whole matrix": "second_moment=matrix",
        "retraction by QR": "retraction=qr",
        "retraction by Cayley": "retraction=cayley",
    }
    return [
        Arm(label="PIT, Z trained", spec=PIT),
        *(Arm(label=label, spec=f"{PIT}+{change}") for label, change in removed.items()),
        Arm(label=TRANSPOSE, spec="transpose"),
        Arm(label=f"{TRANSPOSE}, embeddings normalized", spec="transpose+embedding_norm=true"),
        Arm(label="untied", spec="untied"),
        Arm(label="untied, embeddings normalized", spec="untied+embedding_norm=true"),
    ]
