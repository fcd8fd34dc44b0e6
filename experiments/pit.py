"""PIT's comparisons: Tables 1, 2, 4 and 5, Figure 3, the recipe's ingredients, and 1,800 steps."""

from collections.abc import Sequence
from pathlib import Path

from experiments.comparison import (
    Arm,
    Table,
    Trained,
    interface_table,
    loss_table,
    nats,
    scientific,
    size,
    train_arms,
)
from manifold_tying import diagnostics
from manifold_tying.diagnostics import InterfaceConsistency
from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.hf_model import OUT
from manifold_tying.training.numbers import mean
from manifold_tying.training.progress import Started
from manifold_tying.training.recipes import UNTIED_STD, resolve
from manifold_tying.training.report.load import read_lines
from manifold_tying.training.rundir import METRICS
from manifold_tying.training.sections import Interface

# The paper's cosine distance, Procrustes error and principal angle, by its definition with polar factors.
Printed = tuple[float, float, float]
FROM_SCRATCH: dict[str, Printed] = {"transpose": (0.1241, 0.4925, 0.1121), "pit": (0.0, 0.0, 0.0024)}
CONTINUED: dict[str, Printed] = {"transpose": (0.0089, 0.1333, 0.0106), "pit": (0.0, 0.0, 0.0021)}
TRANSPOSE = "transpose tying"
SCRATCH_COLUMN = "paper: training perplexity (Llama-0.3B)"


def from_scratch(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """The upper halves of Tables 4 and 5."""
    arms = [
        Arm(label=TRANSPOSE, spec="transpose", printed=17.72),
        Arm(
            label="PIT as printed: Z frozen, embeddings as they are",
            spec="pit-frozen+embedding_norm=false",
            printed=50.17,
        ),
        Arm(label="PIT, Z frozen, embeddings normalized", spec="pit-frozen"),
        Arm(label="PIT, Z trained", spec="pit-trainable"),
        Arm(label="untied", spec="untied"),
    ]
    trained = train_arms(out, arms, settings, seeds, started)
    notes = [
        f"{size(settings)}, validation; the paper: Llama-0.3B, FineWeb-Edu, training loss.",
        "Each arm at its own rates (docs/learning-rates.md); the paper trains all by AdamW and names no rates.",
    ]
    losses = loss_table("PIT, Table 4: from-scratch pretraining", trained, SCRATCH_COLUMN, notes)
    return [losses, _consistency("PIT, Table 5: consistency of the interface", trained, FROM_SCRATCH, "Llama-0.3B")]


def continued(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Tables 1 and 2, and Figure 3; the lower halves of Tables 4 and 5 have the same design."""
    arms = [
        Arm(label=TRANSPOSE, spec="transpose", printed=32.52),
        Arm(label="PIT, Z frozen, T = I (the paper's)", spec="pit-frozen+init_transform=identity", printed=15.80),
        Arm(label="PIT, Z frozen, T = H", spec="pit-frozen"),
        Arm(label="PIT, Z frozen, by rotation", spec="pit-frozen+init_transform=rotation"),
        Arm(label="PIT, Z trained, T = H", spec="pit-trainable"),
        Arm(label="PIT, Z trained, by rotation", spec="pit-trainable+init_transform=rotation"),
        Arm(label="PIT, free table, T = I", spec="pit-free+init_transform=identity"),
        Arm(label="PIT, free table, T = H", spec="pit-free"),
        Arm(label="PIT, free table, by rotation", spec="pit-free+init_transform=rotation"),
        Arm(label="untied", spec="untied"),
    ]
    trained = train_arms(out, arms, settings, seeds, started)
    notes = [
        f"Here: {settings.steps * settings.tokens_per_step:,} tokens of {settings.data} after a checkpoint of this project's "
        "making, validation loss; the paper: 10k steps of FineWeb-Edu after Granite4-350M-Base, training loss.",
        "T = I and T = H change the function that is started from, the rotation hardly (docs/continued-pretraining.md).",
    ]
    column = "paper: training perplexity (Granite4-350M-Base)"
    losses = loss_table("PIT, Table 1: continued pretraining", trained, column, notes)
    title = "PIT, Table 2: consistency of the interface"
    return [losses, _consistency(title, trained, CONTINUED, "Granite4-350M-Base"), _early(trained)]


def _consistency(title: str, trained: Trained, printed: dict[str, Printed], model: str) -> Table:
    """Means over seeds of the consistency measures, by both of the paper's definitions."""
    body = []
    for arm in trained.arms:
        found = [_tables_of(folder) for folder in trained.runs(arm).values()]
        if not found:
            continue
        spec = arm.spec or ""
        of_paper = printed["pit"] if spec.startswith("pit") else printed.get(spec)
        columns = ("cosine_distance", "procrustes_error", "principal_angle", "anchor_cosine_distance")
        numbers = [scientific([getattr(one, name) for one in found]) for name in (*columns, "delta_ti")]
        body.append([arm.label, *numbers, " / ".join(f"{number:.4f}" for number in of_paper) if of_paper else ""])
    head = [
        "arm", "cosine distance", "Procrustes error", "principal angle (rad)", "cosine distance of E and W_out⁺",
        "ΔTI", f"paper: first three ({model})",
    ]  # fmt: skip
    notes = [
        "The first three are of the polar factors of E and W_outᵀ, as the paper defines them for its tables: exact transpose "
        "tying has zeros there by that definition, and the paper's non-zero entries for it do not follow from it. E against "
        "the pseudo-inverse of W_out, the paper's equations 1 and 2, separates the arms.",
        "The paper's angles of 0.002 rad for PIT are what the arc cosine of a float32 cosine gives for zero.",
    ]
    return Table(title=title, head=head, body=body, notes=notes)


def _tables_of(run: Path) -> InterfaceConsistency:
    E, W_out, _ = diagnostics.inspect_tables(run / OUT if (run / OUT).is_dir() else run)
    return diagnostics.interface_consistency(E, W_out)


def _early(trained: Trained) -> Table:
    """Training losses at the start and the end of each run."""
    body = []
    for arm in trained.arms:
        curves = [_losses(folder) for folder in trained.runs(arm).values()]
        if curves:
            early = max(1, len(curves[0]) // 10)
            parts = (
                [curve[0] for curve in curves],
                [max(curve[1 : early + 1] or curve) for curve in curves],
                [mean(curve[early : 2 * early] or curve) for curve in curves],
                [mean(curve[-early:]) for curve in curves],
            )
            body.append([arm.label, *map(nats, parts)])
    head = ["arm", "first batch", "largest of the first tenth", "mean of the second tenth", "mean of the last tenth"]
    notes = [
        "The paper's Figure 3 shows a rise of transpose tying at the beginning, and none of PIT; it prints no numbers."
    ]
    return Table(title="PIT, Figure 3: training loss at the beginning", head=head, body=body, notes=notes)


def _losses(run: Path) -> Sequence[float]:
    return [line["loss"] for line in read_lines(run / METRICS, required=("step", "loss"))]


PIT: Interface = "pit-trainable"


def ingredients(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """Ablate the recipe of PIT with a trained Z, one part at a time, and add the one part that plain tables can use."""
    trained = train_arms(out, ingredient_arms(settings), settings, seeds, started)
    notes = [f"{size(settings)}, validation. All else is the recipe's and was not tuned again."]
    title = "One ingredient removed at a time"
    return [loss_table(title, trained, None, notes), interface_table("The interface during training", trained)]


def ingredient_arms(settings: Settings) -> list[Arm]:
    """The recipe's arm first, then one arm for each part removed, then plain tables."""
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


LENGTH_TOKENS = 1_843_200


def length(out: Path, settings: Settings, seeds: int, started: Started | None) -> list[Table]:
    """PIT arms with their recipes, and plain tables with their best settings at this length (docs/learning-rates.md).

    Transpose tying does best with the free table's rates, untied tables with the body's rate and a third of the usual std.
    """
    free = resolve(TrainConfig(out=Path(), interface="pit-free", settings=settings)).settings
    rates = f"lr={free.lr:.4g}+table_lr={free.table_lr:.4g}+table_slows_after={free.table_slows_after}"
    small = f"lr={free.lr:.4g}+table_std={UNTIED_STD / 3:.4g}"
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
