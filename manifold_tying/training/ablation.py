"""Train several arms and seeds on the same data and budget, and summarize the results."""

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
from manifold_tying.training.config import CORPUS, Settings, TrainConfig, check_same, unused_settings
from manifold_tying.training.evaluate import Diverged
from manifold_tying.training.files import check_writable, locked, read_own, write_atomic, writing_to
from manifold_tying.training.loop import Observer, train
from manifold_tying.training.machine import called_as, machine
from manifold_tying.training.processes import Processes
from manifold_tying.training.recipes import resolve
from manifold_tying.training.run_data import load_data, run_data
from manifold_tying.training.rundir import CONFIG, EXPERIMENT, METRICS, RESULT, check_alone, finite

RATES = ("lr", "memory_lr", "table_lr", "transform_lr", "body_lr", "table_std", "embedding_norm")  # per arm
OWN = ("arms", "settings")  # keys of an experiment.json of ours
MOST_SEEDS = 1000  # every run is listed before the first one starts


@dataclass(frozen=True, kw_only=True)
class AblateConfig:
    """Train several arms on the same data, seed by seed, and write summary.json, curves and report.html to DIR.

    The same command again keeps the finished runs in DIR, resumes the unfinished ones and starts the missing ones.
    """

    out: Path
    """Folder to write to."""
    arms: str = ",".join(ARMS)
    """Comma-separated arms: interfaces, or bodies (adamw, muon, poet-block ...) with untied tables. Each may change
    settings: pit-trainable+memory_lr=0.003+body=poet-block."""
    seeds: int = 3
    """Number of seeds: 0, 1, ..."""
    tokens: str | None = None
    """Comma-separated budgets of training tokens, instead of steps; each gets a folder tokens-N in DIR."""
    dry_run: bool = False
    """Train nothing and print one command per run, for a scheduler; ablate afterwards only collects their results."""
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ValueError(f"expected seeds {'>= 1' if self.seeds < 1 else f'<= {MOST_SEEDS}'}, got {self.seeds}")
        if self.tokens is None:
            self.runs()
        else:
            self.budgets()  # each checks its own runs

    def budgets(self) -> "list[AblateConfig]":
        """One experiment per budget of ``tokens``; only this one if ``tokens`` is None."""
        if self.tokens is None:
            return [self]
        size = self.settings.tokens_per_step
        counts = budgets_of(self.tokens, size)
        if self.settings.steps != Settings.steps:
            raise ValueError(f"expected steps or tokens, got both: {self.settings.steps} and {self.tokens}; drop one")
        settings = {count: dataclasses.replace(self.settings, steps=round(count / size)) for count in counts}
        return [
            dataclasses.replace(self, out=self.out / f"tokens-{count}", tokens=None, settings=settings[count])
            for count in counts
        ]

    def runs(self) -> list[tuple[str, TrainConfig]]:
        """(arm, resolved run) in training order: all arms of one seed, then of the next."""
        names = [name.strip() for name in self.arms.split(",") if name.strip()]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected a list of different arms from {', '.join(ARMS + BODIES)}, got {self.arms!r}")
        arms = {name: parse_arm(name, self.settings) for name in names}

        def run_of(name: str, seed: int) -> TrainConfig:
            (interface, own), out = arms[name], run_folder(self.out, name, seed)
            return resolve(TrainConfig(out=out, interface=interface, seed=seed, settings=own))

        runs = [(name, run_of(name, seed)) for seed in range(self.seeds) for name in arms]
        _check_different(dict(runs[: len(arms)]))
        return runs


def used_by_none(config: AblateConfig) -> set[str]:
    """The settings that no arm uses."""
    return set.intersection(*(unused_settings(run.interface, run.settings) for _, run in config.runs()))


def budgets_of(tokens: str, least: int) -> list[int]:
    """Parse comma-separated numbers of tokens; raises ValueError unless they differ and are at least ``least``."""
    words = [word.strip() for word in tokens.split(",")]
    counts = [int(word) for word in words if word.isdecimal() and int(word) >= least]
    if len({round(count / least) for count in counts}) < len(words):
        raise ValueError(
            f"expected different numbers of tokens, each at least {least} (one step) and as far apart, got {tokens!r}"
        )
    return counts


def _check_different(arms: Mapping[str, TrainConfig]) -> None:
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
    """Train the missing runs and return the summary rows, also written to ``OUT/summary.json``.

    With ``tokens``, returns the rows of all budgets; each budget's folder has its own summary.

    Args:
        config: the experiment.
        started: called before each run as (its name, its index, number of runs); returns the run's observer.
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
        earlier = read_own(config.out / EXPERIMENT, OWN).get("arms", ())
        if left := [arm for arm in earlier if arm not in dict(runs)]:
            print(
                f"{config.out} also holds {', '.join(left)}; the summary and the report have only the arms of this command"
            )
        with writing_to(config.out):
            write_atomic(config.out / EXPERIMENT, json.dumps(_describe(config), indent=1).encode())

    processes.on_main(check_folders)
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(locked(config.out)))
        found = processes.from_main(lambda: [_finished(run) for _, run in runs])
        processes.on_main(describe)

        def write_finished() -> list[dict[str, Any]]:
            rows = [{**row, "arm": arm} for (arm, _), row in zip(runs, found, strict=True) if row is not None]
            processes.on_main(lambda: write_atomic(config.out / "summary.json", json.dumps(rows, indent=1).encode()))
            return rows

        rows = write_finished()
        for i, (arm, run) in enumerate(runs):
            if found[i] is None:
                observer = started(run.out.name, i, len(runs)) if started else None
                found[i] = _trained(dataclasses.replace(run, resume=True), arm, observer, processes)
                rows = write_finished()
        return rows


def _check_out(config: AblateConfig) -> None:
    """Raises ValueError if the folder cannot take the experiment; cheap, so that a corpus is not prepared in vain."""
    check_writable(config.out)
    of_budgets = (EXPERIMENT, METRICS) if config.out.name.startswith("tokens-") else ()
    check_alone(config.out, config.out / METRICS, *(config.out.parent / name for name in of_budgets))
    read_own(config.out / EXPERIMENT, OWN)
    for _, run in config.runs():
        check_folder(run)


def _finished(run: TrainConfig) -> dict[str, Any] | None:
    path = run.out / RESULT
    if not path.exists():
        return None
    row = read_object(path, f"delete it, or the folder {run.out}, to train the run again")
    whole = isinstance(row.get("val_loss"), float | None) and (run.out / METRICS).exists()
    if not whole or row.get("seed") != run.seed:
        raise ValueError(f"{run.out} has no whole run of seed {run.seed}; delete that folder to train it again")
    return row


def _trained(run: TrainConfig, arm: str, observer: Observer | None, processes: Processes) -> dict[str, Any]:
    """Train a run and return its row. If it fails, the row has the reason under "failed" and the other arms continue."""
    try:
        return finite(train(run, arm=arm, observer=observer))
    except (ValueError, OSError, RuntimeError) as error:
        if processes.size > 1 and not isinstance(error, Diverged):
            raise  # other ranks may not have this error and would be out of step
        if isinstance(error, Diverged) and (row := processes.from_main(lambda: _finished(run))) is not None:
            return row  # finished, but the final loss is not finite
        return {"arm": arm, "seed": run.seed, "failed": f"{type(error).__name__}: {error}"}


def check_folder(run: TrainConfig, corpus: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError if the folder holds a run with another configuration or another text than ``corpus``."""
    path = run.out / CONFIG
    if path.exists():
        saved = read_object(path, "restore it, or choose another --out")
        current = json.loads(json.dumps({**run.as_json(), CORPUS: corpus}))
        check_same(str(run.out), "holds a run with another", saved, current)


def prepare_data(config: AblateConfig, progress: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Tokenize all data into the cache, so that run times exclude it; returns the fingerprint of each run's text.

    Raises ValueError if a run has too few tokens.
    """
    known: dict[tuple[object, ...], dict[str, Any]] = {}
    found, processes = [], Processes.from_settings(config.settings)
    processes.on_main(lambda: _check_out(config))
    for _, run in config.runs():
        s = run.settings
        key = (s.data, s.tokenizer, s.vocab_size, s.steps * s.tokens_per_step, s.val_tokens, s.sequence_length)
        if key not in known:
            known[key] = run_data(load_data(run, processes, progress), s, run.seed).identity
        found.append(known[key])
    return found


def _describe(config: AblateConfig) -> dict[str, Any]:
    """The experiment's command, machine and settings, for the report."""
    runs = {arm: run for arm, run in config.runs() if run.seed == 0}
    resolved = {arm: run.as_json() for arm, run in runs.items()}
    first, *others = resolved.values()
    shared = {k: v for k, v in first.items() if all(other[k] == v for other in others)}
    of_none = used_by_none(config)
    shared = {k: v for k, v in shared.items() if k not in ("interface", "seed", *of_none) and v is not None}
    arms: dict[str, dict[str, Any]] = {}
    for arm, own in resolved.items():
        settings = runs[arm].settings
        unused = unused_settings(runs[arm].interface, settings)
        hidden = (*shared, "interface", "seed", *unused)
        arms[arm] = {name: None if name in unused else getattr(settings, name) for name in RATES}
        arms[arm] |= {k: own[k] for k in own if k not in hidden}
    return {
        "command": called_as("ablate", "reproduce") or f"ablate({config})",
        "machine": machine(torch.device(config.settings.device)),
        "settings": {**shared, "seeds": config.seeds},
        "arms": arms,
    }
