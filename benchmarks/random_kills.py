"""Kill training runs at random moments until they finish: python -m benchmarks.random_kills --kills 200 --seed 0.

The metrics.jsonl of every run must equal that of an undisturbed run, byte for byte. After each kill every checkpoint in the
folder must be intact.
"""

import dataclasses
import json
import multiprocessing
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro

from manifold_tying.models import PRESETS
from manifold_tying.training import Settings, TrainConfig, train
from manifold_tying.training.checkpoint import check_files, checkpoints, read_state
from manifold_tying.training.rundir import METRICS

KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("pit-trainable", {}),
    ("untied", {"body": "poet-block", "block_size": 8, "merge_every": 7, "body_lr": 2e-3}),
)


@dataclass(frozen=True)
class KillOptions:
    """Which runs to kill, and how often."""

    kills: int = 200
    """Processes to kill; the last killed run is still finished."""
    seed: int = 0
    """Seed for the moments of the kills."""
    seconds: float = 600.0
    """Stop after this time, with the results so far."""
    steps: int = 24
    """Steps of a run."""
    checkpoint_every: int = 3


def random_kills(options: KillOptions, folder: Path) -> dict[str, Any]:
    """Returns {"kills", "runs", "whole_checkpoints", "seconds"}; AssertionError if a run gives other metrics."""
    began, chance = time.monotonic(), random.Random(options.seed)
    corpus = folder / "sums.txt"
    corpus.write_text("\n".join(f"{a} plus {b} is {a + b};" for a in range(60) for b in range(40)))
    shape = dataclasses.replace(PRESETS["nano"], vocab_size=300, hidden_size=16, num_layers=2, intermediate_size=32)
    PRESETS["tiny"] = dataclasses.replace(shape, head_dim=0)
    found = {"kills": 0, "runs": 0, "whole_checkpoints": 0}
    references = []
    for number, (interface, changes) in enumerate(KINDS):
        train(_config(folder / f"first-{number}", corpus, interface, changes, options))  # tokenizes and warms up
        run = _config(folder / f"whole-{number}", corpus, interface, changes, options)
        start = time.monotonic()
        train(run)
        references.append((time.monotonic() - start, (run.out / METRICS).read_bytes()))

    def kills_are_left() -> bool:
        return found["kills"] < options.kills and time.monotonic() - began < options.seconds

    while kills_are_left():
        number = found["runs"] % len(KINDS)
        lasts, expected = references[number]
        run = _config(folder / "killed", corpus, *KINDS[number], options)
        while not _finished_before(run, chance.uniform(0, lasts) if kills_are_left() else None):
            found["kills"] += 1
            for path in checkpoints(run.out):
                check_files(path, read_state(path))
                found["whole_checkpoints"] += 1
        assert (run.out / METRICS).read_bytes() == expected, f"run {found['runs']} differs from the undisturbed one"
        found["runs"] += 1
        shutil.rmtree(run.out)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _config(out: Path, corpus: Path, interface: Any, changes: dict[str, Any], options: KillOptions) -> TrainConfig:
    settings = Settings(
        preset="tiny", data=f"text:{corpus}", steps=options.steps, checkpoint_every=options.checkpoint_every,
        batch_size=2, sequence_length=16, val_tokens=64, eval_every=6, **changes,
    )  # fmt: skip
    return TrainConfig(out=out, interface=interface, resume=True, settings=settings)


def _finished_before(run: TrainConfig, delay: float | None) -> bool:
    """Run in a new process and kill it after ``delay`` seconds; returns whether it finished first."""
    # Fork, because a fresh interpreter would spend seconds on imports.
    process = multiprocessing.get_context("fork").Process(target=train, args=(run,))
    process.start()
    process.join(delay)
    process.kill()
    process.join()
    if process.exitcode not in (0, -9):
        raise AssertionError(f"the run in {run.out} ended with status {process.exitcode}")
    return process.exitcode == 0


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(KillOptions, args=arguments)
    torch.set_num_threads(1)  # threads do not survive a fork
    with TemporaryDirectory() as folder:
        print(json.dumps(random_kills(options, Path(folder))))


if __name__ == "__main__":
    main()
