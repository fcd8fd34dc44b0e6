"""Reading an experiment from its folder: every complaint names the file, the place in it and what to do."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from manifold_tying.training.report._experiment import Experiment, Quantity, Row, Run, arm_names

# null says that there is nothing to measure: no memory, no transform, no rotations, no memory counter;
NULLABLE = {"defect", "delta_ti", "cond_transform", "orthogonality_error", "peak_memory_bytes"}
# but a loss there always is, and null is what JSON has for one that is no longer a number
LOSSES = {"val_loss", "train_loss"}
COURSE = (  # what is drawn out of metrics.jsonl
    "loss", "val_loss", "defect", "delta_ti", "cond_transform", "orthogonality_error", "lr"
)  # fmt: skip
AGAIN = "run `manifold-tying ablate` again to write it anew"


def load_experiment(out: str | Path) -> Experiment:
    """The experiment that ``manifold-tying ablate --out`` left in a folder; ValueError if it is not whole."""
    out = Path(out)
    summary = _json(out / "summary.json")
    rows = checked_rows(summary, where=str(out / "summary.json"))
    described = _object(_json(out / "experiment.json"), str(out / "experiment.json"))
    command = described.get("command")
    if not isinstance(command, str):
        raise ValueError(f"{out / 'experiment.json'}: expected a string under 'command', got {command!r}; {AGAIN}")
    machine, settings, arms = (
        _object(described.get(key), f"{out / 'experiment.json'}, {key!r}") for key in ("machine", "settings", "arms")
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
        runs=[_run(out, row["arm"], row["seed"]) for row in rows],
        command=command,
        machine=machine,
        settings=settings,
        arms={arm: _object(of_arm, f"{out / 'experiment.json'}, arm {arm!r}") for arm, of_arm in arms.items()},
    )


def checked_rows(rows: object, *, where: str) -> list[Row]:
    """The objects of summary.json, checked: a non-empty list, every key there, numbers where numbers belong.

    Runs that stopped before their end have no numbers and are left to :func:`failures`.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ValueError(f"{where}: expected a list with one object per arm and seed, got {_kind(rows)}; {AGAIN}")
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
    row = {"orthogonality_error": None, **_object(value, where)}
    missing = [key for key in ("arm", "seed", *get_args(Quantity)) if key not in row]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; {AGAIN}")
    if not isinstance(row["arm"], str) or not isinstance(row["seed"], int) or isinstance(row["seed"], bool):
        raise ValueError(f"{where}: expected a string 'arm' and an integer 'seed', got {row['arm']!r}, {row['seed']!r}")
    for key in get_args(Quantity):
        if not (row[key] is None and key in NULLABLE | LOSSES):
            _number(row[key], key, where)
    return cast(Row, row | {key: math.nan for key in LOSSES if row[key] is None})


def _run(out: Path, arm: str, seed: int) -> Run:
    folder = out / f"{arm}-{seed}"
    metrics = list(_lines(folder / "metrics.jsonl", required=("step", "tokens"), optional=COURSE))
    timing = _lines(folder / "timing.jsonl", required=("step", "seconds"))
    seconds = {line["step"]: line["seconds"] for line in timing}
    probes = _probes(folder / "probes.jsonl") if (folder / "probes.jsonl").exists() else []
    return Run(arm=arm, seed=seed, metrics=metrics, seconds=seconds, probes=probes)


def _probes(path: Path) -> list[Mapping[str, Any]]:
    """The looks at the weights, each weight's numbers in one flat object: svd_entropy, R.vector, updates.min, ..."""
    probes: list[Mapping[str, Any]] = []
    for count, line in enumerate(_lines(path, required=("step", "tokens")), start=1):
        where = f"{path}, line {count}"
        weights = _object(line.get("weights"), f"{where}, 'weights'")
        flat = {name: _flat(numbers, f"{where}, {name}") for name, numbers in weights.items()}
        probes.append({**line, "weights": flat})
    return probes


def _flat(numbers: object, where: str) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in _object(numbers, where).items():
        if isinstance(value, list) and value:
            named: dict[str, Any] = {"min": value[0], "median": value[len(value) // 2], "max": value[-1]}
        elif isinstance(value, Mapping):
            named = dict(value)
        else:
            _number(value, key, where)
            flat[key] = value
            continue
        for name, one in named.items():
            _number(one, f"{key}.{name}", where)
            flat[f"{key}.{name}"] = one
    return flat


def _lines(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """The objects of a .jsonl file: numbers under the required keys, numbers or null or nothing under the optional."""
    for count, text in enumerate(_text(path).splitlines(), start=1):
        where = f"{path}, line {count}"
        try:
            line = _object(json.loads(text), where)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg}); a run that was cut short? {AGAIN}") from None
        for key in required:
            _number(line.get(key), key, where)
        for key in optional:
            if line.get(key) is not None:
                _number(line[key], key, where)
        yield line


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: not the folder of a finished ablation? give its --out, or {AGAIN}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {AGAIN}") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}); {AGAIN}") from None


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {_kind(value)}; {AGAIN}")
    return value


def _number(value: object, key: str, where: str) -> None:
    # bool is an int to Python, and not a measurement; NaN and infinity are: they are how a run diverges
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number under {key!r}, got {value!r}; {AGAIN}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
