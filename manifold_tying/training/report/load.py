"""Load and check the folder of an ablation or a run: rows, metrics as data frames, settings. Errors name file and line."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from manifold_tying._json import NotJSON, parsed, read_bytes
from manifold_tying.training.arms import run_folder
from manifold_tying.training.config import ARM, CORPUS, POET_SETTINGS
from manifold_tying.training.sections import Body, Interface

Row = Mapping[str, Any]  # an entry of summary.json: the result of one arm with one seed
BASELINES = ("transpose", "adamw")  # the first of these that exists is the baseline
TRAINED = (*get_args(Interface), *get_args(Body))
# null if the model has no memory, transform or rotations to measure
NULLABLE = ("peak_memory_bytes", "defect", "delta_ti", "cond_transform", "orthogonality_error")
LOSSES = ("val_loss", "train_loss")  # null if not finite
QUANTITIES = (*LOSSES, "tokens", "seconds", "tokens_per_second", *NULLABLE, "trainable_parameters", "evaluated_tokens")
COURSE = ("loss", "val_loss", "defect", "delta_ti", "cond_transform", "orthogonality_error")  # of metrics.jsonl
AGAIN = "run the command that wrote the folder again"
ABLATION, RUN = ("summary.json", "experiment.json"), ("config.json", "result.json", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The metrics of one run. NaN: not measured. inf: measured, but not finite."""

    arm: str
    seed: int
    metrics: pd.DataFrame
    """A line per step: ``step``, ``tokens``, ``seconds`` (without evaluation) and the quantities of ``COURSE``."""
    probes: pd.DataFrame
    """A line per evaluation and ``weight``: ``step``, ``tokens`` and its probes: svd_entropy, R.vector, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A loaded folder; ``kind`` is "ablation" or "run"."""

    name: str
    command: str
    machine: Mapping[str, Any]
    kind: str = "ablation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """The content of a report."""

    rows: Sequence[Row]
    runs: Sequence[Run]
    sources: Sequence[Source]
    settings: Mapping[str, Any]
    """Settings shared by all arms."""
    arms: Mapping[str, Mapping[str, Any]]
    """The settings of each arm, including its learning rates."""
    failures: Sequence[str] = ()
    """A sentence for each run that stopped early."""


def arm_names(rows: Iterable[Row]) -> list[str]:
    """The arms in order of first appearance."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def by_seed(rows: Iterable[Row], arm: str, quantity: str) -> dict[int, float]:
    """One quantity of one arm by seed, without runs that lack it."""
    return {row["seed"]: row[quantity] for row in rows if row["arm"] == arm and row[quantity] is not None}


def interface_of(arm: str) -> str:
    """The interface or body of an arm: pit-frozen for ``pit-frozen+lr=0.002``, untied for ``mine/untied``."""
    plain = re.sub(r"\+(?:data|tokenizer)=[^+]*", "", arm)  # paths may end like an arm
    named = re.findall(rf"(?:^|/)({'|'.join(TRAINED)})(?=\+|$)", plain)
    return named[-1] if named else arm.partition("+")[0]  # the last one: a folder may be named like an arm


def baseline_of(arms: Sequence[str]) -> str | None:
    """The baseline: transpose, else its first variant, else adamw."""
    for baseline in BASELINES:
        if variants := [arm for arm in arms if interface_of(arm) == baseline]:
            return baseline if baseline in variants else variants[0]
    return None


def load_experiment(folder: str | Path) -> Experiment:
    """Load a folder that ``ablate --out`` or ``train --out`` wrote; raises ValueError if it is incomplete."""
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
    summary = read_json(out / "summary.json")
    rows = checked_rows(summary, where=str(out / "summary.json"))
    where = str(out / "experiment.json")
    described = as_object(read_json(out / "experiment.json"), where)
    keys = ("machine", "settings", "arms")
    machine, settings, arms = (as_object(described.get(key), f"{where}, {key!r}") for key in keys)
    if strangers := [arm for arm in arm_names(rows) if arm not in arms]:
        raise ValueError(
            f"{out}: summary.json has an arm {strangers[0]!r} that experiment.json lacks, so they are from different "
            f"experiments; {AGAIN}"
        )
    return Experiment(
        rows=rows,
        failures=failures(summary),
        runs=[_run(run_folder(out, row["arm"], row["seed"]), row) for row in rows],
        sources=[Source(name=out.resolve().name, command=as_text(described, "command", where), machine=machine)],
        settings=settings,
        arms={arm: as_object(own, f"{where}, arm {arm!r}") for arm, own in arms.items()},
    )


def _single_run(out: Path) -> Experiment:
    if not (out / "result.json").exists():
        raise ValueError(f"{out} holds a run that has not finished: result.json is missing; use train --resume")
    (row,) = checked_rows([read_json(out / "result.json")], where=str(out / "result.json"))
    config = as_object(read_json(out / "config.json"), str(out / "config.json"))
    unused = (ARM, CORPUS, *(() if str(config.get("body")).startswith("poet") else POET_SETTINGS))
    where = str(out / "run.json")
    described = as_object(read_json(out / "run.json"), where)
    command, machine = as_text(described, "command", where), as_object(described.get("machine"), f"{where}, 'machine'")
    return Experiment(
        rows=[row],
        runs=[_run(out, row)],
        sources=[Source(name=out.resolve().name, command=command, machine=machine, kind="run")],
        settings={key: value for key, value in config.items() if value is not None and key not in unused},
        arms={row["arm"]: {}},
    )


def _with_evaluated_tokens(experiment: Experiment) -> Experiment:
    """Replace ``val_tokens`` by the number of evaluated tokens, which is smaller for a small corpus."""
    evaluated = {row["arm"]: row["evaluated_tokens"] for row in experiment.rows}
    default = next(iter(evaluated.values()))  # for unfinished arms
    of_arms = {arm: evaluated.get(arm, own.get("val_tokens", default)) for arm, own in experiment.arms.items()}
    settings, arms = dict(experiment.settings), {arm: dict(own) for arm, own in experiment.arms.items()}
    for place in (settings, *arms.values()):
        place.pop("val_tokens", None)
    if set(of_arms.values()) == {default}:
        settings["val_tokens"] = default
    else:
        arms = {arm: {**own, "val_tokens": of_arms[arm]} for arm, own in arms.items()}
    return replace(experiment, settings=settings, arms=arms)


def checked_rows(rows: object, *, where: str) -> list[Row]:
    """Check the entries of summary.json, and return those of finished runs."""
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ValueError(f"{where}: expected a list with one object per arm and seed, got {type_name(rows)}; {AGAIN}")
    checked = [_row(row, f"{where}, entry {place}") for place, row in enumerate(rows) if not _failed(row)]
    if not checked:
        raise ValueError(f"{where}: no run has finished yet; report once at least one has")
    for (arm, seed), count in Counter((row["arm"], row["seed"]) for row in checked).items():
        if count > 1:
            raise ValueError(f"{where}: arm {arm!r} with seed {seed} appears twice; remove one of the two")
    return checked


def failures(rows: Iterable[object]) -> list[str]:
    """A sentence for each run that stopped before its end."""
    stopped = [row for row in rows if isinstance(row, Mapping) and _failed(row)]
    return [f"{row.get('arm')}, seed {row.get('seed')}, stopped before its end: {row['failed']}." for row in stopped]


def _failed(row: object) -> bool:
    return isinstance(row, Mapping) and "failed" in row


def _row(value: object, where: str) -> Row:
    row = as_object(value, where)
    if missing := [key for key in ("arm", "seed", *QUANTITIES, "held_out_sha256") if key not in row]:
        raise ValueError(f"{where}: missing {', '.join(missing)}; {AGAIN}")
    if not isinstance(row["arm"], str) or not isinstance(row["seed"], int) or isinstance(row["seed"], bool):
        raise ValueError(f"{where}: expected a string 'arm' and an integer 'seed', got {row['arm']!r}, {row['seed']!r}")
    for key in QUANTITIES:
        if row[key] is not None or key not in NULLABLE + LOSSES:
            as_number(row[key], key, where)
    as_text(row, "held_out_sha256", where)
    return {**row, **{key: math.nan for key in LOSSES if row[key] is None}}


def _run(folder: Path, row: Row) -> Run:
    metrics = _frame(read_lines(folder / "metrics.jsonl", ("step", "tokens"), COURSE), ("step", "tokens", *COURSE))
    timing = _frame(read_lines(folder / "timing.jsonl", ("step", "seconds")), ("step", "seconds"))
    metrics = metrics.merge(timing, on="step", how="left")
    path, probed = folder / "probes.jsonl", []
    for count, line in enumerate(read_lines(path, ("step", "tokens")), start=1):
        weights = as_object(line.get("weights"), f"{path}, line {count}, 'weights'")
        for name, numbers in weights.items():
            flat = _flat(numbers, f"{path}, line {count}, {name}")
            probed.append({"step": line["step"], "tokens": line["tokens"], "weight": name, **flat})
    probes = pd.DataFrame(probed).drop_duplicates(["weight", "step"], keep="last") if probed else pd.DataFrame()
    return Run(arm=row["arm"], seed=row["seed"], metrics=metrics, probes=probes)


def _frame(lines: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """One row per step, the last of duplicates. NaN means missing; values that are not finite become inf."""
    table = [[None if line.get(key) is None else _or_inf(line[key]) for key in columns] for line in lines]
    return pd.DataFrame(table, columns=list(columns), dtype=float).drop_duplicates("step", keep="last")


def _or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _flat(numbers: object, where: str) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in as_object(numbers, where).items():
        named: Mapping[str, Any] = {key: value}
        if isinstance(value, list) and value:
            named = {f"{key}.min": value[0], f"{key}.median": value[len(value) // 2], f"{key}.max": value[-1]}
        elif isinstance(value, Mapping):
            named = {f"{key}.{name}": one for name, one in value.items()}
        for name, one in named.items():
            flat[name] = _or_inf(as_number(one, name, where))
    return flat


def read_lines(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """The objects of a .jsonl file. Required keys hold numbers; optional keys hold a number or null, or are missing."""
    for count, text in enumerate(_content(path).splitlines(), start=1):
        where = f"{path}, line {count}"
        try:
            line = as_object(parsed(text), where)
        except NotJSON as error:
            raise ValueError(f"{where}: not JSON ({error}); was the run interrupted? {AGAIN}") from None
        for key in (*required, *(key for key in optional if line.get(key) is not None)):
            as_number(line.get(key), key, where)
        yield line


def read_json(path: Path) -> Any:
    try:
        return parsed(_content(path))
    except NotJSON as error:
        raise ValueError(f"{path}: not JSON ({error}); {AGAIN}") from None


def _content(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the --out of a finished run or ablation, or {AGAIN}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {AGAIN}") from None


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {type_name(value)}; {AGAIN}")
    return value


def as_text(values: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(text := values.get(key), str):
        raise ValueError(f"{where}: expected a string under {key!r}, got {text!r}; {AGAIN}")
    return text


def as_number(value: Any, key: str, where: str) -> float:
    # In Python bool is an int. NaN and infinity are valid: they come from a diverged run.
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > 1e300):
        raise ValueError(f"{where}: expected a number under {key!r}, got {value!r}; {AGAIN}")
    return value


def type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
