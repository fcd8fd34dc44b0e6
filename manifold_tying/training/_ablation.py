"""Several arms and seeds on the same data and budget, and what came out."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from manifold_tying.training._command import called_as, train_command
from manifold_tying.training._config import POET_SETTINGS, Body, Interface, Settings, TrainConfig
from manifold_tying.training._files import write_whole
from manifold_tying.training._loop import CONFIG, RESULT, Observer, discard, load_data_together, train
from manifold_tying.training._machine import machine
from manifold_tying.training._processes import Processes
from manifold_tying.training._recipe import resolve, used_rates
from manifold_tying.training._record import finite
from manifold_tying.training._step import Diverged

ARMS: tuple[Interface, ...] = get_args(Interface)
BODIES: tuple[Body, ...] = get_args(Body)


@dataclass(frozen=True, kw_only=True)
class AblateConfig:
    """Train several arms on the same data, seed by seed, and write summary.json, curves and report.html to DIR.

    Finished runs in DIR are kept and unfinished ones resumed, so the same command again only does what is missing.
    """

    out: Path
    """Folder to write to."""
    arms: str = ",".join(ARMS)
    """Interfaces to compare, separated by commas, and bodies (adamw, poet-block, poet-full), which stand between untied
    tables; each may change settings: pit-trainable+memory_lr=0.003+body=poet-block."""
    seeds: int = 3
    """Number of seeds; they are 0, 1, ..."""
    dry_run: bool = False
    """Train nothing and print one command per run, for a scheduler; ablate afterwards only collects their results."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"expected seeds >= 1, got {self.seeds}")
        self.runs()

    def runs(self) -> list[tuple[str, TrainConfig]]:
        """(arm, resolved run) in the order in which they are trained: all arms of one seed, then the next."""
        names = [name.strip() for name in self.arms.split(",") if name.strip()]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected a list of different arms from {', '.join(ARMS + BODIES)}, got {self.arms!r}")
        arms = {name: parse_arm(name, self.settings) for name in names}
        return [
            (name, resolve(TrainConfig(out=self.out / f"{name}-{seed}", interface=interface, seed=seed, settings=own)))
            for seed in range(self.seeds)
            for name, (interface, own) in arms.items()
        ]


def parse_arm(name: str, shared: Settings) -> tuple[Interface, Settings]:
    """``interface[+name=value]...`` to its interface and its settings; ValueError that lists the choices otherwise.

    A body in place of the interface is that body between untied tables, as in POET's experiments.
    """
    first, *changes = name.split("+")
    fields = {field.name for field in dataclasses.fields(Settings)} - {
        "init_from"
    }  # all arms start from one checkpoint
    values: dict[str, Any] = {}
    known = next((arm for arm in ARMS if arm == first), None)
    if known is None:
        known = "untied"
        values["body"] = next((body for body in BODIES if body == first), None)
        fields -= {"body"}
        if values["body"] is None:
            choices = ", ".join(ARMS + BODIES)
            raise ValueError(f"unknown arm {first!r}; choose from {choices}, with changes as in untied+lr=0.002")
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in fields:
            raise ValueError(
                f"unknown change {change!r} in arm {name!r}; write name=value with one of {sorted(fields)}"
            )
        values[key] = _value(text, key)
    return known, dataclasses.replace(shared, **values)


def ablate(config: AblateConfig, *, started: Callable[[str, int, int], Observer] | None = None) -> list[dict[str, Any]]:
    """Run what is missing and return the summary rows, which are also written to ``OUT/summary.json``.

    Args:
        config: the experiment.
        started: called as (name of the run, its number, number of runs) before each; returns that run's observer.
    """
    runs = config.runs()
    processes = Processes.of(config.settings)

    def open_folder() -> None:
        for _, run in runs:
            check_folder(run)
        try:
            config.out.mkdir(parents=True, exist_ok=True)
            write_whole(config.out / "experiment.json", json.dumps(_describe(config), indent=1).encode())
        except OSError as error:
            raise ValueError(
                f"cannot write to {config.out}: {error.strerror}; choose a folder that is writable"
            ) from error

    processes.first(open_folder)
    rows: list[dict[str, Any]] = []
    for i, (arm, run) in enumerate(runs):
        row = processes.first(lambda run=run: _finished(run))  # type: ignore[misc]
        if row is None:
            observer = started(run.out.name, i, len(runs)) if started else None
            row = _trained(dataclasses.replace(run, resume=True), arm, observer, processes)
        rows.append({**row, "arm": arm})
        processes.first(lambda: discard(write_whole(config.out / "summary.json", json.dumps(rows, indent=1).encode())))
    return rows


def _finished(run: TrainConfig) -> dict[str, Any] | None:
    result = run.out / RESULT
    return json.loads(result.read_text()) if result.exists() else None


def _trained(run: TrainConfig, arm: str, observer: Observer | None, processes: Processes) -> dict[str, Any]:
    """The run's row; where it stops, a row that says why under "failed", and the other arms go on."""
    try:
        return finite(train(run, arm=arm, observer=observer))
    except (ValueError, OSError, RuntimeError) as error:
        if processes.size > 1 and not isinstance(error, Diverged):
            raise  # the others may not have met it, and are then no longer at the same place
        return {"arm": arm, "seed": run.seed, "failed": f"{type(error).__name__}: {error}"}


def commands(config: AblateConfig) -> list[str]:
    """One command per arm and seed, quoted for a shell, that does what :func:`ablate` does for it."""
    return [train_command(run) for _, run in config.runs()]


def check_folder(run: TrainConfig) -> None:
    """ValueError where the run's folder holds a run of another configuration."""
    path = run.out / CONFIG
    if path.exists():
        there, here = json.loads(path.read_text()), json.loads(json.dumps(run.as_json()))
        if there != here:
            names = sorted(k for k in {*there, *here} if there.get(k) != here.get(k))
            raise ValueError(f"{run.out} holds a run with another {', '.join(names)}; choose another --out")


def prepare_data(config: AblateConfig, progress: Callable[[str], None] | None = None) -> None:
    """Bring every arm's tokens into the cache, so that no run's time contains it."""
    seen, processes = set(), Processes.of(config.settings)
    for _, run in config.runs():
        s = run.settings
        key = (s.data, s.tokenizer, s.vocab_size, s.steps * s.tokens_per_step)
        if key not in seen:
            seen.add(key)
            load_data_together(run, processes, progress)


def _describe(config: AblateConfig) -> dict[str, Any]:
    """What the report says of the experiment beside its results."""
    runs = {arm: run for arm, run in reversed(config.runs())}
    per_arm = {arm: used_rates(run.interface, run.settings) for arm, run in reversed(runs.items())}
    resolved = [run.as_json() for run in runs.values()]
    shared = {k: v for k, v in resolved[0].items() if all(other[k] == v for other in resolved)}
    shared = {k: v for k, v in shared.items() if k not in ("interface", "seed") and v is not None}
    if shared.get("body") == "adamw":
        shared = {k: v for k, v in shared.items() if k not in POET_SETTINGS}
    for arm, run in runs.items():
        own = run.as_json()
        per_arm[arm] |= {k: own[k] for k in own if k not in shared and k not in ("interface", "seed")}
    return {
        "command": called_as("ablate", "reproduce") or f"ablate({config})",
        "machine": machine(torch.device(config.settings.device)),
        "settings": {**shared, "seeds": config.seeds},
        "arms": per_arm,
    }


def _value(text: str, key: str) -> Any:
    """The text as JSON where it is JSON (numbers, true, null), else as it stands."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    hint = Settings.__annotations__[key]
    allowed = {t for t in (int, float, str, bool) if t in (get_args(hint) or (hint,))} or {str}
    fits = type(value) in allowed or (type(value) is int and float in allowed)
    fits |= value is None and type(None) in get_args(hint)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"expected {key} to be of type {hint}, got {text!r}")
    return value
