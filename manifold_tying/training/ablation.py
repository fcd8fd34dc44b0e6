"""Several arms and seeds on the same data and budget, and what came out."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manifold_tying._json import read_object
from manifold_tying.training.arms import ARMS, BODIES, parse_arm, run_folder
from manifold_tying.training.config import (
    CORPUS,
    POET_SETTINGS,
    Settings,
    TrainConfig,
    differing,
    other_text,
    unused_settings,
)
from manifold_tying.training.files import locked, write_whole, writing_to
from manifold_tying.training.loop import Diverged, Observer, load_data, run_data, train
from manifold_tying.training.machine import called_as, machine
from manifold_tying.training.processes import Processes
from manifold_tying.training.recipes import resolve
from manifold_tying.training.rundir import CONFIG, RESULT, finite

RATES = ("lr", "memory_lr", "table_lr", "transform_lr", "equivalence_lr", "table_std", "embedding_norm")  # of each arm
MOST_SEEDS = 1000  # every run is listed before the first one starts


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
    tokens: str | None = None
    """Training tokens of several budgets in place of steps, separated by commas; each has its own folder tokens-N in DIR."""
    dry_run: bool = False
    """Train nothing and print one command per run, for a scheduler; ablate afterwards only collects their results."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ValueError(f"expected seeds {'>= 1' if self.seeds < 1 else f'<= {MOST_SEEDS}'}, got {self.seeds}")
        if self.tokens is None:
            self.runs()
        else:
            self.budgets()  # each checks its own runs

    def budgets(self) -> "list[AblateConfig]":
        """The same experiment at each budget of ``tokens``; this one alone where there is none."""
        if self.tokens is None:
            return [self]
        size = self.settings.tokens_per_step
        counts = budgets_of(self.tokens, size)
        if self.settings.steps != Settings.steps:
            raise ValueError(
                f"expected steps or tokens, got both: {self.settings.steps} and {self.tokens}; leave one out"
            )
        return [
            dataclasses.replace(
                self,
                out=self.out / f"tokens-{count}",
                tokens=None,
                settings=dataclasses.replace(self.settings, steps=round(count / size)),
            )
            for count in counts
        ]

    def runs(self) -> list[tuple[str, TrainConfig]]:
        """(arm, resolved run) in the order in which they are trained: all arms of one seed, then the next."""
        names = [name.strip() for name in self.arms.split(",") if name.strip()]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected a list of different arms from {', '.join(ARMS + BODIES)}, got {self.arms!r}")
        arms = {name: parse_arm(name, self.settings) for name in names}
        runs = [
            (
                name,
                resolve(
                    TrainConfig(out=run_folder(self.out, name, seed), interface=interface, seed=seed, settings=own)
                ),
            )
            for seed in range(self.seeds)
            for name, (interface, own) in arms.items()
        ]
        _check_different(dict(runs[: len(arms)]))
        return runs


def budgets_of(tokens: str, least: int) -> list[int]:
    """Numbers of tokens separated by commas; ValueError where they are not different numbers of at least ``least``."""
    words = [word.strip() for word in tokens.split(",")]
    counts = [int(word) for word in words if word.isdecimal() and int(word) >= least]
    if len(set(counts)) < len(words):
        raise ValueError(
            f"expected different numbers of tokens, each at least the {least} of a step, separated by commas; got {tokens!r}"
        )
    return counts


def _check_different(arms: Mapping[str, TrainConfig]) -> None:
    """ValueError where two arms would train the same model twice."""
    first: dict[str, str] = {}
    for name, run in arms.items():
        unused = unused_settings(run.interface, run.settings)
        used = {name: value for name, value in run.as_json().items() if name not in unused}
        other = first.setdefault(json.dumps(used), name)
        if other != name:
            raise ValueError(
                f"expected arms that differ, but {other!r} and {name!r} have the same settings once the recipe's values are "
                "filled in. Leave one out, or change a setting that it uses"
            )


def ablate(config: AblateConfig, *, started: Callable[[str, int, int], Observer] | None = None) -> list[dict[str, Any]]:
    """Run what is missing and return the summary rows, which are also written to ``OUT/summary.json``.

    With ``tokens``, the rows of all budgets, one after the other; each budget's own are in its folder.

    Args:
        config: the experiment.
        started: called as (name of the run, its number, number of runs) before each; returns that run's observer.
    """
    if config.tokens is not None:
        return [row for budget in config.budgets() for row in ablate(budget, started=started)]
    runs = config.runs()
    processes = Processes.from_settings(config.settings)
    corpora = prepare_data(config)

    def check_folders() -> None:
        for (_, run), corpus in zip(runs, corpora, strict=True):
            check_folder(run, corpus)

    def describe() -> None:
        with writing_to(config.out):
            write_whole(config.out / "experiment.json", json.dumps(_describe(config), indent=1).encode())

    rows: list[dict[str, Any]] = []
    processes.on_main(check_folders)
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(locked(config.out)))
        processes.on_main(describe)
        for i, (arm, run) in enumerate(runs):
            row = processes.from_main(lambda run=run: _finished(run))  # type: ignore[misc]
            if row is None:
                observer = started(run.out.name, i, len(runs)) if started else None
                row = _trained(dataclasses.replace(run, resume=True), arm, observer, processes)
            rows.append({**row, "arm": arm})
            processes.on_main(lambda: write_whole(config.out / "summary.json", json.dumps(rows, indent=1).encode()))
    return rows


def _finished(run: TrainConfig) -> dict[str, Any] | None:
    result = run.out / RESULT
    return (
        read_object(result, f"delete it, or the folder {run.out}, to train the run again") if result.exists() else None
    )


def _trained(run: TrainConfig, arm: str, observer: Observer | None, processes: Processes) -> dict[str, Any]:
    """The run's row; where it stops, a row that says why under "failed", and the other arms go on."""
    try:
        return finite(train(run, arm=arm, observer=observer))
    except (ValueError, OSError, RuntimeError) as error:
        if processes.size > 1 and not isinstance(error, Diverged):
            raise  # the others may not have met it, and are then no longer at the same place
        if isinstance(error, Diverged) and (row := processes.from_main(lambda: _finished(run))) is not None:
            return row  # it came to its end, without a finite loss there
        return {"arm": arm, "seed": run.seed, "failed": f"{type(error).__name__}: {error}"}


def commands(config: AblateConfig) -> list[str]:
    """One command per arm and seed, quoted for a shell, that does what :func:`ablate` does for it."""
    return [run.command() for _, run in config.runs()]


def check_folder(run: TrainConfig, corpus: Mapping[str, Any] | None = None) -> None:
    """ValueError where the run's folder holds a run of another configuration, or of another text than ``corpus``."""
    path = run.out / CONFIG
    if path.exists():
        there = read_object(path, "restore it, or choose another --out")
        here = json.loads(json.dumps({**run.as_json(), CORPUS: corpus}))
        names = differing(there, here)
        if names == [CORPUS]:
            raise ValueError(other_text(str(run.out), there, here))
        if names:
            listed = ", ".join(f"{name} ({there.get(name)} there, {here.get(name)} here)" for name in names)
            raise ValueError(f"{run.out} holds a run with another {listed}; choose another --out")


def prepare_data(config: AblateConfig, progress: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Bring every arm's tokens into the cache, so that no run's time contains it; returns what identifies those of each run.

    ValueError where there are too few of them for a run.
    """
    known: dict[tuple[object, ...], dict[str, Any]] = {}
    found, processes = [], Processes.from_settings(config.settings)
    for _, run in config.runs():
        s = run.settings
        key = (s.data, s.tokenizer, s.vocab_size, s.steps * s.tokens_per_step, s.val_tokens, s.sequence_length)
        if key not in known:
            known[key] = run_data(load_data(run, processes, progress), s, run.seed).identity
        found.append(known[key])
    return found


def _describe(config: AblateConfig) -> dict[str, Any]:
    """What the report says of the experiment beside its results."""
    runs = {arm: run for arm, run in reversed(config.runs())}
    unused = {arm: unused_settings(run.interface, run.settings) for arm, run in reversed(runs.items())}
    per_arm: dict[str, dict[str, Any]] = {
        arm: {name: None if name in names else getattr(runs[arm].settings, name) for name in RATES}
        for arm, names in unused.items()
    }
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
