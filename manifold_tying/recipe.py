"""PIT's learning rates and schedule for your own training loop; docs/learning-rates.md explains them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from manifold_tying import precision
from manifold_tying.optim import param_groups
from manifold_tying.tying import PIT, FreePIT, ManifoldPIT

# Adam moves an entry by about its learning rate: one step at the peak changes an entry by this share of its size.
ENTRY_STEP = 0.3
TRANSFORM_FACTOR = 5.0
# T mostly learns its diagonal. At the full rate the d² other entries are noise; with a frozen memory they drove cond(T) to
# 2e7 in some runs.
OFF_DIAGONAL_SCALE = 0.1
# Rows of a memory cannot grow, so constant steps keep turning them as far as at the start; a 1/√step decay compensates.
# A free table also trains better with it.
SLOWS_AFTER = 60
FINAL_RATE = 0.1  # fraction of the peak at the end of the cosine


def pit_groups(model: nn.Module, lr: float, *, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups for a model that contains PIT: the recipe of ``manifold-tying train`` from scratch.

        optimizer = torch.optim.AdamW(pit_groups(model, lr=4e-3), betas=(0.9, 0.99))
        schedule = pit_schedule(optimizer, steps=1000)  # schedule.step() after each optimizer.step()

    The learning rate of a free table W is 0.3 times the standard deviation of its entries; any optimizer takes these groups.
    A trainable memory Z (V, d) gets 0.3 / √V and the Cholesky factor of T 5 lr, with a tenth of that off the diagonal; both
    need :class:`~manifold_tying.optim.RiemannianAdam`.

    Args:
        model: contains one PIT interface.
        lr: peak learning rate of all other parameters: 4e-3 · 128 / d from d = 128 on. Narrower models were not tuned; at
            d = 16 that rule is too high.
        weight_decay: for the other matrices; see ``param_groups``.

    Raises:
        ValueError: the model does not contain exactly one PIT.
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
    return [{"lr": lr, **group} for group in param_groups(model, weight_decay=weight_decay, overrides=overrides)]


def off_diagonal_scale(hidden_size: int, scale: float) -> Tensor:
    """A group's "scale" (d, d) for the Cholesky factor: 1 on the diagonal, ``scale`` elsewhere."""
    return torch.full((hidden_size, hidden_size), scale).fill_diagonal_(1.0)


def pit_schedule(optimizer: torch.optim.Optimizer, steps: int, *, warmup: int | None = None) -> LambdaLR:
    """Learning-rate schedule for the groups of :func:`pit_groups`; see :func:`rate_factor` for its shape.

    Args:
        optimizer: made from those groups, at their peak rates.
        steps: number of steps of the run.
        warmup: steps of linear warm-up; None means a tenth of the steps, at most 1000.
    """
    precision.check_int("steps", steps, 1)
    first = min(1000, -(-steps // 10)) if warmup is None else warmup

    def factor_of(group: dict[str, Any]) -> Callable[[int], float]:
        return lambda step: rate_factor(step, steps, first, group.get("slows_after"))

    return LambdaLR(optimizer, [factor_of(group) for group in optimizer.param_groups])


def rate_factor(step: int, steps: int, warmup: int, slows_after: int | None = None) -> float:
    """Learning rate divided by its peak at step 0, 1, ...: linear warm-up, then a cosine down to a tenth at the last step.

    From step n = ``slows_after`` on it is also multiplied by √(n / step).
    """
    slowed = 1.0 if slows_after is None else min(1.0, math.sqrt(slows_after / max(1, step)))
    if step < warmup:
        return slowed * (step + 1) / warmup
    decay = steps - 1 - warmup
    progress = min(1.0, (step - warmup) / decay) if decay > 0 else 1.0
    return slowed * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)
