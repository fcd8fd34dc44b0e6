"""An experiment as it lies on disk: arms (what is compared) times seeds (how often)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict, get_args

from manifold_tying.training._config import Body, Interface

BASELINES = ("transpose", "adamw")  # what the other arms are measured against: the first of these that there is

TRAINED = (*get_args(Interface), *get_args(Body))

Quantity = Literal[
    "val_loss",
    "train_loss",
    "tokens",
    "seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "defect",
    "delta_ti",
    "cond_transform",
    "orthogonality_error",
    "trainable_parameters",
]


class Row(TypedDict):
    """One object of summary.json: how the run of one arm with one seed ended."""

    arm: str
    seed: int
    val_loss: float  # NaN where the run diverged
    train_loss: float
    tokens: float
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: float | None  # not every device counts its memory
    defect: float | None  # without a memory there is no defect,
    delta_ti: float | None
    cond_transform: float | None  # without a transform no condition number,
    orthogonality_error: float | None  # and without a POET body no rotations
    trainable_parameters: float
    evaluated_tokens: NotRequired[int]  # of the held-out text that the first versions did not record,
    held_out_sha256: NotRequired[str]  # and what tells it from another


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The course of one run."""

    arm: str
    seed: int
    metrics: Sequence[Mapping[str, Any]]
    """One object per step: ``step``, ``tokens``, and whichever quantities were measured then."""
    seconds: Mapping[int, float]
    """Wall time since the start of training, evaluation excluded, by step."""
    probes: Sequence[Mapping[str, Any]] = ()
    """One object per evaluation: ``step``, ``tokens``, and under ``weights`` the numbers of each weight, flat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A folder that was read: its name, and how and on what it came about."""

    name: str
    command: str
    """"" where it was not recorded."""
    machine: Mapping[str, Any]
    kind: Literal["ablation", "run"] = "ablation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """All that the report knows."""

    rows: Sequence[Row]
    runs: Sequence[Run]
    sources: Sequence[Source]
    """The folders that it comes from."""
    settings: Mapping[str, Any]
    """What all arms share."""
    arms: Mapping[str, Mapping[str, Any]]
    """The settings of each arm, its learning rates among them."""
    failures: Sequence[str] = ()
    """A sentence for each run that stopped before its end."""


def arm_names(rows: Sequence[Row]) -> list[str]:
    """The arms in the order in which they first appear."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def interface_of(arm: str) -> str:
    """What an arm trains: ``pit-frozen+lr=0.002`` is a pit-frozen with a setting of its own, ``mine/untied`` is the untied of a
    folder."""
    named = re.findall(rf"(?:^|/)({'|'.join(TRAINED)})(?=\+|$)", arm)  # the last: a folder may be called as an arm is
    return named[-1] if named else arm.partition("+")[0]


def baseline_of(arms: Sequence[str]) -> str | None:
    """The arm to measure against: transpose as it stands, else its first variant; adamw where there is neither."""
    for baseline in BASELINES:
        variants = [arm for arm in arms if interface_of(arm) == baseline]
        if variants:
            return baseline if baseline in variants else variants[0]
    return None


def seeds_of(rows: Sequence[Row], arm: str) -> list[int]:
    """The seeds that an arm was run with, sorted."""
    return sorted(row["seed"] for row in rows if row["arm"] == arm)


def by_seed(rows: Sequence[Row], arm: str, quantity: Quantity) -> dict[int, float]:
    """One quantity of one arm by seed, without the runs in which it was not measured."""
    values = {row["seed"]: row[quantity] for row in rows if row["arm"] == arm}
    return {seed: value for seed, value in values.items() if value is not None}
