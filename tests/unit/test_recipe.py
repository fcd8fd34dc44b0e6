"""PIT's recipe for a loop of one's own is that of the command."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam
from manifold_tying.recipe import rate_factor
from manifold_tying.training import TrainConfig, resolve
from manifold_tying.training.build import build_model, build_optimizer


@pytest.mark.parametrize("interface", ["pit-free", "pit-trainable", "pit-frozen"])
def test_groups_are_those_of_the_command(interface: Any) -> None:
    config = resolve(TrainConfig(out=Path("unused"), interface=interface))
    model: Any = build_model(config)
    assert config.settings.lr is not None
    ours = RiemannianAdam(mt.pit_groups(model, config.settings.lr), betas=(0.9, 0.99))
    command = build_optimizer(model, config.settings)

    def options(optimizer: Any) -> list[Any]:
        groups = optimizer.param_groups
        return sorted((g["lr"], g["weight_decay"], g.get("slows_after") or 0, len(g["params"])) for g in groups)

    assert torch.allclose(torch.tensor(options(ours)), torch.tensor(options(command)), rtol=0.01)  # the std is measured
    assert [s.sum() for s in ours._scales.values()] == [s.sum() for s in command._scales.values()]


def test_the_schedule_sets_each_group() -> None:
    model = nn.ModuleDict({"interface": mt.PIT(64, 8), "body": nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(mt.pit_groups(model, 1e-2))
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = mt.pit_schedule(optimizer, steps=100)
    found = []
    for _ in range(100):
        found.append([group["lr"] / peak for group, peak in zip(optimizer.param_groups, peaks, strict=True)])
        optimizer.step()
        schedule.step()
    for group, factors in zip(optimizer.param_groups, zip(*found, strict=True), strict=True):
        slows_after = group.get("slows_after")
        assert factors == pytest.approx([rate_factor(step, 100, 10, slows_after) for step in range(100)])
    assert [group.get("slows_after") for group in optimizer.param_groups].count(60) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_one_interface_is_asked_for(count: int) -> None:
    with pytest.raises(ValueError, match=f"one PIT interface, got {count}"):
        mt.pit_groups(nn.ModuleList([mt.PIT(8, 4) for _ in range(count)]), 1e-3)


def test_rates_warm_up_decay_and_slow_down() -> None:
    factors = [rate_factor(step, 100, 10) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1 and factors[55] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 45 / 89)))
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
    slowed = [rate_factor(step, 100, 10, 20) / factors[step] for step in range(100)]
    assert slowed == pytest.approx([1.0] * 20 + [math.sqrt(20 / step) for step in range(20, 100)])


@pytest.mark.parametrize("steps", [2, 3, 180])
def test_the_last_step_is_small_in_short_runs_too(steps: int) -> None:
    assert rate_factor(steps - 1, steps, -(-steps // 10)) == pytest.approx(0.1)
