"""PIT's learning rates and their schedule, for training loops of one's own (docs/learning-rates.md says why)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from manifold_tying.optim import param_groups
from manifold_tying.tying import PIT, FreePIT, ManifoldPIT

# Adam moves an entry by about its learning rate. This is the share of an entry that one step may change at the peak.
ENTRY_STEP = 0.3
TRANSFORM_FACTOR = 5.0
# Most of what T has to learn is its size, on the diagonal. At the whole rate the d² other entries are noise, and with a frozen
# memory they drove cond(T) to 2e7 in some runs.
OFF_DIAGONAL_SCALE = 0.1
# Rows of a memory cannot grow, so a step of constant size turns them as far as at the start. A rate that falls as one over the
# root of the steps makes up for it. A free table gains by it, too.
SLOWS_AFTER = 60
FINAL_RATE = 0.1  # of the peak, at the end of the cosine


def pit_groups(model: nn.Module, lr: float, *, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for a model with PIT in it, by the recipe of ``manifold-tying train`` from scratch.

        optimizer = torch.optim.AdamW(pit_groups(model, lr=4e-3), betas=(0.9, 0.99))
        schedule = pit_schedule(optimizer, steps=1000)  # schedule.step() after each optimizer.step()

    A free table W learns at 0.3 times the standard deviation of its entries; any optimizer takes these groups. A trainable
    memory Z (V, d) learns at 0.3 / √V, and the Cholesky factor of T at 5 lr, its off-diagonal entries at a tenth of that: these
    need :class:`~manifold_tying.optim.RiemannianAdam`.

    Args:
        model: with one PIT interface.
        lr: peak learning rate of everything else. At a width of 128 it was 4e-3, and less in proportion at larger widths.
        weight_decay: of the other matrices; see ``param_groups``.

    Raises:
        ValueError: no PIT in the model, or more than one.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, PIT)]
    if len(found) != 1:
        raise ValueError(f"expected a model with one PIT interface, got {len(found)}")
    (name, pit), overrides = found[0], dict[str, dict[str, Any]]()
    prefix = f"{name}." if name else ""
    if isinstance(pit, FreePIT):
        std = pit.table.detach().std().item()
        overrides[f"{prefix}table"] = {"lr": ENTRY_STEP * std, "slows_after": SLOWS_AFTER, "weight_decay": 0.0}
    elif isinstance(pit, ManifoldPIT):
        rate = {"lr": ENTRY_STEP / pit.vocab_size**0.5, "slows_after": SLOWS_AFTER}
        overrides[f"{prefix}parametrizations.memory.*"] = rate
        factor = {"lr": TRANSFORM_FACTOR * lr, "scale": off_diagonal_scale(pit.hidden_size, OFF_DIAGONAL_SCALE)}
        overrides[f"{prefix}parametrizations.cholesky_factor.*"] = factor
    groups = param_groups(model, weight_decay=weight_decay, overrides=overrides)
    return [{"lr": lr, **group} for group in groups]


def off_diagonal_scale(hidden_size: int, scale: float) -> Tensor:
    """A group's "scale" (d, d) for the Cholesky factor: 1 on the diagonal."""
    return torch.full((hidden_size, hidden_size), scale).fill_diagonal_(1.0)


def pit_schedule(optimizer: torch.optim.Optimizer, steps: int, *, warmup: int | None = None) -> LambdaLR:
    """The schedule that belongs to :func:`pit_groups`: see :func:`rate_factor`.

    Args:
        optimizer: made of those groups, at their peak rates.
        steps: of the whole run.
        warmup: steps of the linear warm-up; None is a tenth of the steps, at most 1000.
    """
    first = min(1000, -(-steps // 10)) if warmup is None else warmup

    def factor_of(group: dict[str, Any]) -> Callable[[int], float]:
        return lambda step: rate_factor(step, steps, first, group.get("slows_after"))

    return LambdaLR(optimizer, [factor_of(group) for group in optimizer.param_groups])


def rate_factor(step: int, steps: int, warmup: int, slows_after: int | None = None) -> float:
    """Learning rate over its peak at step 0, 1, ...: linear warm-up, then a cosine to a tenth at the last step.

    From step n = ``slows_after`` on times √(n / step).
    """
    slowed = 1.0 if slows_after is None else min(1.0, math.sqrt(slows_after / max(1, step)))
    if step < warmup:
        return slowed * (step + 1) / warmup
    decay = steps - 1 - warmup
    progress = min(1.0, (step - warmup) / decay) if decay > 0 else 1.0
    return slowed * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)
