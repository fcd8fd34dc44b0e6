"""Pretraining from scratch at several budgets, with each arm tuned by the same number of trials at each budget."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.comparison import (
    Arm,
    Table,
    Trained,
    interface_table,
    loss_table,
    nats,
    size,
    train_arms,
)
from experiments.pit import TRANSPOSE
from manifold_tying._json import read_object
from manifold_tying.models import preset
from manifold_tying.recipe import ENTRY_STEP, SLOWS_AFTER
from manifold_tying.training.arms import parse_arm, run_folder
from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.numbers import DASH, fixed, mean, paired_differences
from manifold_tying.training.progress import Started
from manifold_tying.training.recipes import resolve
from manifold_tying.training.rundir import RESULT
from manifold_tying.training.sections import Interface
from manifold_tying.tying import tied_std

Factors = Mapping[str, float]
# Factors on the recipe's values in each trial. Twice the body's rate never won; longer runs prefer less.
_ALL: tuple[Factors, ...] = ({}, {"lr": 0.5}, {"lr": 0.25})
TABLES: tuple[Factors, ...] = (*_ALL, {"lr": 0.5, "table_std": 1 / 3})
TRANSFORM: tuple[Factors, ...] = (*_ALL, {"transform_lr": 0.5})
GRADIENT_SCALE = 5.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arm and how it is tuned."""

    label: str
    interface: Interface
    trials: Sequence[Factors]
    changes: str = ""
    """As ``ablate --arms`` takes them after the interface."""

    @property
    def plain(self) -> bool:
        """Whether its tables are plain."""
        return not self.interface.startswith("pit")


def candidates(hidden_size: int) -> dict[str, Candidate]:
    """Plain tables that are known to do well, and PIT, by their name in ``--arms``."""
    rate = ENTRY_STEP * tied_std(hidden_size)
    normalized = f"embedding_norm=true+table_lr={rate:.4g}+table_slows_after={SLOWS_AFTER}"
    plain: dict[str, tuple[str, Interface, str]] = {
        "transpose": (TRANSPOSE, "transpose", ""),
        "transpose-scaled": (f"{TRANSPOSE}, embeddings times √d", "transpose", f"embedding_scale={hidden_size**0.5:.4g}"),
        "transpose-normalized": (f"{TRANSPOSE}, embeddings normalized", "transpose", "embedding_norm=true"),
        "transpose-gradient": (
            f"{TRANSPOSE}, lookup's gradients times {GRADIENT_SCALE:g}", "transpose",
            f"input_gradient_scale={GRADIENT_SCALE:g}",
        ),
        "transpose-logits": (f"{TRANSPOSE}, learned logit scale", "transpose", "logit_scale=true"),
        "untied": ("untied", "untied", ""),
        "untied-normalized": ("untied, embeddings normalized", "untied", "embedding_norm=true"),
        "transpose-rate": (f"{TRANSPOSE}, embeddings normalized, PIT's rate for the table", "transpose", normalized),
        "untied-rate": ("untied, embeddings normalized, PIT's rate for the tables", "untied", normalized),
    }  # fmt: skip
    found = {key: Candidate(label, interface, TABLES, changes) for key, (label, interface, changes) in plain.items()}
    return {
        **found,
        "pit-frozen": Candidate("PIT, Z frozen", "pit-frozen", TRANSFORM),
        "pit-trainable": Candidate("PIT, Z trained", "pit-trainable", TRANSFORM),
        "pit-free": Candidate("PIT, free table", "pit-free", TABLES),
    }


def trial_specs(candidate: Candidate, settings: Settings) -> list[str]:
    """The trials of an arm for ``ablate --arms``; the first is the recipe."""
    spec = "+".join(part for part in (candidate.interface, candidate.changes) if part)
    interface, own = parse_arm(spec, settings)
    resolved = resolve(TrainConfig(out=Path(), interface=interface, settings=own)).settings
    # T's rate follows the body's by default, so a trial that changes one sets both.
    names = sorted({name for factors in candidate.trials for name in factors})
    usual = {name: float(getattr(resolved, name)) for name in names}
    return [
        "+".join([spec, *(f"{name}={usual[name] * factors.get(name, 1.0):.4g}" for name in names if factors)])
        for factors in candidate.trials
    ]


def budgets(
    out: Path,
    settings: Settings,
    tokens: Sequence[int],
    arms: Sequence[str] | None,
    seeds: int,
    started: Started | None,
) -> list[Table]:
    """At each number of tokens, run all trials with seed 0, then each arm's best trial with every seed.

    Args:
        out: parent of a folder tokens-N for each budget.
        settings: settings of every run except its steps.
        tokens: the budgets.
        arms: keys of :func:`candidates`; None is all.
        seeds: number of seeds for the best trial.
        started: called before every run.
    """
    known = candidates(preset(settings.preset).hidden_size)
    chosen = {key: known[key] for key in arms or known}
    trained: dict[int, Trained] = {}
    tables: list[Table] = []
    for count in tokens:
        own = dataclasses.replace(settings, steps=max(1, round(count / settings.tokens_per_step)))
        trained[count], of_budget = _tuned(out / f"tokens-{count}", own, chosen, seeds, started)
        tables += of_budget
    return [_lead(trained, {candidate.label for candidate in chosen.values() if candidate.plain}), *tables]


def plan(out: Path, settings: Settings, tokens: Sequence[int], arms: Sequence[str] | None, seeds: int) -> Table:
    """How many runs of :func:`budgets` are done and missing, and the hours that the missing ones take at the others' speed."""
    known = candidates(preset(settings.preset).hidden_size)
    chosen = [known[key] for key in arms or known]
    specs = [spec for candidate in chosen for spec in trial_specs(candidate, settings)]
    wanted = sum(len(candidate.trials) + seeds - 1 for candidate in chosen)
    done: dict[int, list[dict[str, Any]]] = {}
    for count in tokens:
        files = [run_folder(out / f"tokens-{count}", spec, seed) / RESULT for spec in specs for seed in range(seeds)]
        done[count] = [read_object(file, "remove its folder to run it again") for file in files if file.is_file()]
    speeds = [result["seconds"] / result["tokens"] for results in done.values() for result in results]
    body = []
    for count, results in done.items():
        missing = max(0, wanted - len(results))
        hours = fixed(missing * count * mean(speeds) / 3600, 1) if speeds else DASH
        body.append([f"{count:,}", str(len(results)), str(missing), hours])
    notes = ["Hours of one process at the mean speed of the runs done."]
    return Table(title="Runs", head=["tokens", "done", "missing", "hours"], body=body, notes=notes)


def _tuned(
    out: Path, settings: Settings, chosen: Mapping[str, Candidate], seeds: int, started: Started | None
) -> tuple[Trained, list[Table]]:
    specs = {candidate.label: trial_specs(candidate, settings) for candidate in chosen.values()}
    if started is not None:
        started = functools.partial(started, steps=settings.steps)
    everything = [Arm(label=label, spec=spec) for label in specs for spec in specs[label]]
    tried = train_arms(out, everything, settings, 1, started)
    losses = {arm.spec: tried.values(arm, "val_loss").get(0) for arm in everything}
    body, best = [], []
    for label, of_arm in specs.items():
        finished = [spec for spec in of_arm if losses[spec] is not None]
        lowest = min(finished, key=lambda spec: losses[spec] or 0.0, default=None)
        if lowest is not None:
            best.append(Arm(label=label, spec=lowest))
        for spec in of_arm:
            loss = losses[spec]
            cell = DASH if loss is None else fixed(loss, 3)
            body.append([label, f"`{spec}`", cell, "yes" if spec == lowest else ""])
    budget = f"{settings.steps * settings.tokens_per_step:,} tokens"
    trials = Table(
        title=f"The trials, {budget}, seed 0",
        head=["arm", "settings", "loss (nats/token)", "chosen"],
        body=body,
        notes=["What is not named has the recipe's value (docs/learning-rates.md).", *tried.failures()],
    )
    trained = train_arms(out, best, settings, seeds, started)
    notes = [
        f"{size(settings)}, validation.",
        "Seed 0 also chose the settings, for every arm among the same number of trials.",
    ]
    return trained, [
        loss_table(f"Every arm at the best of its trials, {budget}", trained, None, notes),
        interface_table(f"The interface during training, {budget}", trained),
        trials,
    ]


def _lead(trained: Mapping[int, Trained], plain: set[str]) -> Table:
    """The loss of every arm at every budget, and the best plain arm's loss above PIT's with a trained memory."""
    labels = list(dict.fromkeys(arm.label for one in trained.values() for arm in one.arms))
    losses = {
        count: {arm.label: arm_losses for arm in one.arms if (arm_losses := one.values(arm, "val_loss"))}
        for count, one in trained.items()
    }
    body = [
        [label, *(nats(list(of_budget.get(label, {}).values())) for of_budget in losses.values())] for label in labels
    ]
    pit = candidates(1)["pit-trainable"].label
    if pit in labels and plain & set(labels):
        lead = ["best plain arm above PIT, Z trained (paired)"]
        for of_budget in losses.values():
            means = {label: mean(list(values.values())) for label, values in of_budget.items() if label in plain}
            strongest = min(means, key=lambda label: means[label], default=None)
            difference = paired_differences(of_budget[strongest], of_budget.get(pit, {})) if strongest else []
            lead.append(f"{nats(difference, signed=True)} ({strongest})" if difference else DASH)
        body.append(lead)
    head = ["arm, loss (nats/token)", *(f"{count:,} tokens" for count in trained)]
    return Table(title="Every arm at every budget", head=head, body=body)
