"""What tests/processes/test_interrupted.py interrupts: ``python interrupted_ablation.py NUMBER ARGUMENT...``.

Runs ``manifold-tying ARGUMENT...``. In its NUMBER-th evaluation, from 1, it prints "evaluating" and waits for a line of its
standard input.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from training_runs import config

from manifold_tying.cli import main
from manifold_tying.training import _loop as loop

config(Path(), Path())  # makes the preset
left = int(sys.argv[1])
real = loop.evaluate


def evaluate(*arguments: Any) -> Any:
    global left
    left -= 1
    return real(*arguments)


def wait(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    global left
    if left == 0:
        left = -1
        print("evaluating", flush=True)
        sys.stdin.readline()


vars(loop)["evaluate"] = evaluate
torch.nn.modules.module.register_module_forward_hook(wait)
main(sys.argv[2:])
