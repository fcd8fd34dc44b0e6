"""Reading what ``ablate`` or ``train`` left in a folder."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from manifold_tying.training._arms import run_folder
from manifold_tying.training._config import POET_SETTINGS
from manifold_tying.training._identity import ARM, CORPUS
from manifold_tying.training.report._checked import AGAIN, check_number, json_of, kind_of, object_of, text_under
from manifold_tying.training.report._course import course_of
from manifold_tying.training.report._experiment import Experiment, Quantity, Row, Source, arm_names

# null says that there is nothing to measure: no memory, no transform, no rotations, no memory counter;
NULLABLE = {"defect", "delta_ti", "cond_transform", "orthogonality_error", "peak_memory_bytes"}
# but a loss there always is, and null is what JSON has for one that is no longer a number
LOSSES = {"val_loss", "train_loss"}
ABLATION, RUN = ("summary.json", "experiment.json"), ("config.json", "result.json", "metrics.jsonl")


def load_experiment(folder: str | Path) -> Experiment:
    """What ``manifold-tying ablate --out`` or ``train --out`` left in a folder; ValueError if it is not whole."""
    folder = Path(folder)
    if any((folder / name).exists() for name in ABLATION):
        return _with_evaluated_tokens(_ablation(folder))
    if any((folder / name).exists() for name in RUN):
        return _with_evaluated_tokens(_single_run(folder))
    raise ValueError(
        f"{folder} is neither an ablation ({', '.join(ABLATION)}) nor a run ({', '.join(RUN)}): "
        "give the --out of manifold-tying ablate or train"
    )


def _ablation(out: Path) -> Experiment:
    summary = json_of(out / "summary.json")
    rows = checked_rows(summary, where=str(out / "summary.json"))
    where = str(out / "experiment.json")
    described = object_of(json_of(out / "experiment.json"), where)
    command = text_under(described, "command", where)
    machine, settings, arms = (
        object_of(described.get(key), f"{where}, {key!r}") for key in ("machine", "settings", "arms")
    )
    for arm in arm_names(rows):
        if arm not in arms:
            raise ValueError(
                f"{out}: summary.json has an arm {arm!r} that experiment.json does not describe, so the two come from "
                f"different experiments; {AGAIN}"
            )
    return Experiment(
        rows=rows,
        failures=failures(summary),
        runs=[course_of(run_folder(out, row["arm"], row["seed"]), row["arm"], row["seed"]) for row in rows],
        sources=[Source(name=_name(out), command=command, machine=machine)],
        settings=settings,
        arms={arm: object_of(of_arm, f"{where}, arm {arm!r}") for arm, of_arm in arms.items()},
    )


def _single_run(out: Path) -> Experiment:
    if not (out / "result.json").exists():
        raise ValueError(f"{out} holds a run that has not finished: result.json is missing; go on with train --resume")
    (row,) = checked_rows([json_of(out / "result.json")], where=str(out / "result.json"))
    config = object_of(json_of(out / "config.json"), str(out / "config.json"))
    unused = (ARM, CORPUS, *(POET_SETTINGS if config.get("body") == "adamw" else ()))
    command, machine = "", {}
    if (out / "run.json").exists():  # the first versions wrote none
        described = object_of(json_of(out / "run.json"), str(out / "run.json"))
        command = text_under(described, "command", str(out / "run.json"))
        machine = dict(object_of(described.get("machine"), f"{out / 'run.json'}, 'machine'"))
    return Experiment(
        rows=[row],
        runs=[course_of(out, row["arm"], row["seed"])],
        sources=[Source(name=_name(out), command=command, machine=machine, kind="run")],
        settings={key: value for key, value in config.items() if value is not None and key not in unused},
        arms={row["arm"]: {}},
    )


def _with_evaluated_tokens(experiment: Experiment) -> Experiment:
    """``val_tokens`` as the number that was evaluated; the setting is a request, which a small corpus cannot meet."""
    evaluated = {row["arm"]: row["evaluated_tokens"] for row in experiment.rows if "evaluated_tokens" in row}
    if not evaluated:  # the first versions did not record it
        return experiment
    usual = next(iter(evaluated.values()))  # of arms that are not finished, too
    of_arms = {arm: evaluated.get(arm, own.get("val_tokens", usual)) for arm, own in experiment.arms.items()}
    if set(of_arms.values()) == {usual}:
        arms = {arm: {k: v for k, v in own.items() if k != "val_tokens"} for arm, own in experiment.arms.items()}
        return replace(experiment, settings={**experiment.settings, "val_tokens": usual}, arms=arms)
    settings = {k: v for k, v in experiment.settings.items() if k != "val_tokens"}
    arms = {arm: {**own, "val_tokens": of_arms[arm]} for arm, own in experiment.arms.items()}
    return replace(experiment, settings=settings, arms=arms)


def _name(folder: Path) -> str:
    return folder.resolve().name


def checked_rows(rows: object, *, where: str) -> list[Row]:
    """The objects of summary.json, checked: a non-empty list, every key there, numbers where numbers belong.

    Runs that stopped before their end have no numbers and are left to :func:`failures`.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ValueError(f"{where}: expected a list with one object per arm and seed, got {kind_of(rows)}; {AGAIN}")
    checked = [_row(row, f"{where}, entry {position}") for position, row in enumerate(rows) if not _failed(row)]
    if not checked:
        raise ValueError(f"{where}: no run has finished yet; report once at least one has")
    runs = [(row["arm"], row["seed"]) for row in checked]
    for run in runs:
        if runs.count(run) > 1:
            raise ValueError(f"{where}: arm {run[0]!r} with seed {run[1]} appears twice; remove one of the two")
    return checked


def failures(rows: Iterable[object]) -> list[str]:
    """A sentence for each run that stopped before its end."""
    return [
        f"{row.get('arm')}, seed {row.get('seed')}, stopped before its end: {row['failed']}."
        for row in rows
        if isinstance(row, Mapping) and _failed(row)
    ]


def _failed(row: object) -> bool:
    return isinstance(row, Mapping) and "failed" in row


def _row(value: object, where: str) -> Row:
    # The first versions knew no rotations.
    row = {"orthogonality_error": None, **object_of(value, where)}
    missing = [key for key in ("arm", "seed", *get_args(Quantity)) if key not in row]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; {AGAIN}")
    if not isinstance(row["arm"], str) or not isinstance(row["seed"], int) or isinstance(row["seed"], bool):
        raise ValueError(f"{where}: expected a string 'arm' and an integer 'seed', got {row['arm']!r}, {row['seed']!r}")
    for key in get_args(Quantity):
        if not (row[key] is None and key in NULLABLE | LOSSES):
            check_number(row[key], key, where)
    if "held_out_sha256" in row:  # the first versions wrote neither of the two
        text_under(row, "held_out_sha256", where)
        check_number(row.get("evaluated_tokens"), "evaluated_tokens", where)
    return cast(Row, row | {key: math.nan for key in LOSSES if row[key] is None})
