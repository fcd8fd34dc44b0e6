"""The folder of a run: made, or found with the checkpoint that the run goes on from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manifold_tying.training._checkpoint import advice, checkpoints, find_checkpoint, set_aside, set_newer_aside
from manifold_tying.training._command import called_as, train_command
from manifold_tying.training._config import TrainConfig
from manifold_tying.training._files import Damaged, write_whole, writing_to
from manifold_tying.training._identity import ARM
from manifold_tying.training._machine import machine
from manifold_tying.training._processes import Processes
from manifold_tying.training._record import METRICS, read_logs

CONFIG, RESULT = "config.json", "result.json"
ORIGIN = "run.json"  # apart from the configuration: a resumed run may be called otherwise, and elsewhere


def open_folder(
    config: TrainConfig, arm: str, identity: dict[str, Any], processes: Processes, load: Callable[[Path], int]
) -> int:
    """Make the run's folder, or ``load`` its newest intact checkpoint; returns the step reached.

    Newer checkpoints and damaged ones are set aside.
    """
    found = None
    start, damaged = 0, {}
    for path in processes.first(lambda: _candidates(config)):
        try:
            start, found = load(path), path
            break
        except Damaged as error:
            if config.resume_from is not None:
                raise
            damaged[path] = str(error).removesuffix(advice(path))
    processes.on_first(lambda: read_logs(config.out, start))  # refuses before anything is changed

    def write() -> None:
        with writing_to(config.out):
            result = config.out / RESULT
            if start < config.settings.steps and result.exists():  # of a run that went further
                os.replace(result, result.with_name(f"aside-{RESULT}"))
            for path, what in damaged.items():
                where = found.name if found else "the start"
                print(f"{what}Set aside as {set_aside(path).name}; going on from {where}")
            if found is not None:
                set_newer_aside(found)
            write_whole(config.out / CONFIG, json.dumps({ARM: arm, **identity}, indent=1).encode())
            device = torch.device(config.settings.device)
            origin = {"command": called_as("train") or train_command(config), "machine": machine(device)}
            write_whole(config.out / ORIGIN, json.dumps(origin, indent=1).encode())

    processes.on_first(write)
    return start


def _candidates(config: TrainConfig) -> list[Path]:
    """Where to go on from, the best first; ValueError where the folder holds a run that nobody asked to go on with."""
    if config.resume_from is not None:
        return [find_checkpoint(config.out, config.resume_from)]
    saved = checkpoints(config.out)
    if not config.resume and (saved or (config.out / METRICS).exists()):
        raise ValueError(f"{config.out} holds a run already; go on with it (--resume) or choose another folder")
    return saved[::-1]
