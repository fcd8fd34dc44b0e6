"""The runs by which one process is compared with several, and with processes that were killed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manifold_tying.models import PRESETS
from manifold_tying.training import Settings, TrainConfig, loop
from manifold_tying.training.build import build_model

TINY = "tiny-for-tests"
SHAPE = dataclasses.replace(
    PRESETS["nano"], vocab_size=299, hidden_size=16, num_layers=2, intermediate_size=32, head_dim=0
)
STEPS, EVERY = 12, 6
# name: (sizes of the group, interface, settings); 5 sequences are shared as 3 + 2, 2 + 2 + 1 and, of "hsdp" and of runs that
# four processes resume, as 2 + 1 + 1 + 1
RUNS: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "fsdp": ((2,), "pit-trainable", {"parallel": "fsdp"}),
    "ddp": ((2,), "pit-trainable", {"parallel": "ddp"}),
    "hsdp": ((4,), "pit-trainable", {"parallel": "hsdp"}),
    "parts": ((2,), "pit-frozen", {"parallel": "ddp", "accumulate": 2, "batch_size": 6}),
    "untied": ((3,), "untied", {}),
    "free": ((2,), "pit-free", {"parallel": "fsdp"}),
    "tied": ((2,), "transpose", {"second_moment": "row", "accumulate": 2, "batch_size": 6}),
    "row": ((2,), "pit-trainable", {"second_moment": "row", "parallel": "fsdp"}),
    "poet-fsdp": ((2,), "untied", {"body": "poet-block", "body_lr": 2e-3, "parallel": "fsdp"}),
    "poet-ddp": ((2,), "pit-frozen", {"body": "poet-full", "body_lr": 2e-3, "parallel": "ddp"}),
}
PRESETS[TINY] = SHAPE


def text(folder: Path) -> Path:
    """A corpus with something to learn in it: sums that are right."""
    path = folder / "sums.txt"
    path.write_text("\n".join(f"{a} plus {b} is {a + b};" for a in range(60) for b in range(40)))
    return path


def config(out: Path, corpus: Path, interface: Any = "pit-trainable", **changes: Any) -> TrainConfig:
    """Twelve steps of a model that trains in milliseconds."""
    own = {name: changes.pop(name) for name in ("resume", "resume_from", "seed") if name in changes}
    values = {
        "preset": TINY, "data": f"text:{corpus}", "steps": STEPS, "batch_size": 5, "sequence_length": 16,
        "val_tokens": 128, "eval_every": 4, "checkpoint_every": EVERY, "lr": 4e-3, "merge_every": 4, "block_size": 8,
        **changes,
    }  # fmt: skip
    return TrainConfig(out=out, interface=interface, settings=Settings(**values), **own)


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    """An observer that interrupts the run when the metrics of a step have been written, and its checkpoint has not."""

    def observe(metrics: dict[str, Any]) -> None:
        if metrics["step"] == step:
            raise KeyboardInterrupt

    return observe


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int, interface: str = "") -> None:
    """A gradient that is NaN at these steps, of arms with this interface."""
    real = build_model

    def poisoned(run: TrainConfig) -> Any:
        model = real(run)
        calls = [0]

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return grad * float("nan") if calls[0] in steps else grad

        if run.interface.startswith(interface):
            dict(model.named_parameters())["blocks.1.mlp.down.weight"].register_hook(spoil)
        return model

    monkeypatch.setattr(loop, "build_model", poisoned)
