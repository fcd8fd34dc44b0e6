"""The command line of a run, for whoever wants to do it again."""

import dataclasses
import shlex
import sys

from manifold_tying.training._config import Settings, TrainConfig


def called_as(*subcommands: str) -> str | None:
    """The command line by which this process was started, quoted for a shell, where it is one of these subcommands'."""
    return shlex.join(["manifold-tying", *sys.argv[1:]]) if sys.argv[1:] and sys.argv[1] in subcommands else None


def train_command(run: TrainConfig) -> str:
    """The ``train`` command, quoted for a shell, that does the run; settings at their default are left out."""
    words = ["manifold-tying", "train", "--out", str(run.out), "--interface", run.interface]
    words += ["--seed", str(run.seed), "--resume"]
    for field in dataclasses.fields(Settings):
        value = getattr(run.settings, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if isinstance(value, bool) and field.default is False:
            words.append(flag)
        else:
            words += [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return shlex.join(words)
