"""Time of a whole training step of each token interface, as a ratio to transpose tying at the same shape.

    python -m benchmarks.training_step --preset nano --tokens 2048 --device cpu

The interfaces take turns, step by step, in one process, so that whatever else the machine does hits all of them; what is
reported is the median over steps of each interface's time over transpose tying's time in the same round.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from manifold_tying.models import preset
from manifold_tying.training import Settings, TrainConfig
from manifold_tying.training._build import build_model, build_optimizer
from manifold_tying.training._config import Interface, check_device
from manifold_tying.training._machine import machine
from manifold_tying.training._recipe import resolve

INTERFACES: tuple[Interface, ...] = ("transpose", "untied", "pit-frozen", "pit-trainable")


@dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    preset: str = "nano"
    tokens: int = 2048
    sequence_length: int = 128
    rounds: int = 30
    warmup: int = 5
    device: str = "cpu"
    compile: bool = False
    out: Path | None = None
    """JSON file to write."""


def measure(config: Config) -> dict[str, object]:
    device = check_device(config.device)
    shape = (config.tokens // config.sequence_length, config.sequence_length)
    steps = []
    for interface in INTERFACES:
        run = resolve(
            TrainConfig(
                out=Path("unused"),
                interface=interface,
                settings=Settings(preset=config.preset, device=config.device, embedding_norm=True),
            )
        )
        model = build_model(run)
        steps.append((model, build_optimizer(model, run.settings)))
    losses = [torch.compile(model.loss) if config.compile else model.loss for model, _ in steps]
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {interface: [] for interface in INTERFACES}
    for _ in range(config.warmup + config.rounds):
        ids = torch.randint(preset(config.preset).vocab_size, shape, generator=generator).to(device)
        for interface, loss_of, (_, optimizer) in zip(INTERFACES, losses, steps, strict=True):
            began = _now(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(ids, ids.roll(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times[interface].append(_now(device) - began)
    kept = {interface: values[config.warmup :] for interface, values in times.items()}
    return {
        "benchmark": "training_step",
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items()},
        "machine": machine(device),
        "milliseconds": {name: round(1000 * statistics.median(values), 2) for name, values in kept.items()},
        "ratio_to_transpose": {
            name: round(statistics.median(a / b for a, b in zip(values, kept["transpose"], strict=True)), 3)
            for name, values in kept.items()
        },
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    config = tyro.cli(Config, description=__doc__)
    result = json.dumps(measure(config), indent=1)
    print(result)
    if config.out is not None:
        config.out.write_text(result + "\n")
