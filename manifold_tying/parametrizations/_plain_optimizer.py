"""A warning at the first step that an optimizer without manifolds takes on a point."""

import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from manifold_tying._geoopt import geoopt


@dataclass
class _Look:
    """What was found when an optimizer was last looked at."""

    count: int  # parameters, and points ever registered: neither is ever taken back
    waiting: list[Tensor]  # points without a gradient so far
    warned: set[int]


_points: WeakSet[ParametrizationList] = WeakSet()
_registered = 0
_KEY = "_look_at_points"  # where an optimizer keeps its _Look; no optimizer pickles such an attribute


def watch(parts: ParametrizationList) -> None:
    """Warn when an optimizer that knows no manifold moves ``parts.original``.

    The first call installs a hook after the steps of all optimizers. It looks at an optimizer once, and again where the
    optimizer's parameters or the points have changed.
    """
    global _registered
    if parts not in _points:
        if not _registered:
            register_optimizer_step_post_hook(_after_step)
        _registered += 1
        _points.add(parts)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "follows_manifolds", False):
        (_look_untraced if torch.compiler.is_compiling() else _look_at)(optimizer)


def _look_at(optimizer: Optimizer) -> None:
    attributes = vars(optimizer)
    look = attributes.get(_KEY)
    count = _registered
    for group in optimizer.param_groups:
        count += len(group["params"])
    if look is None or look.count != count or (look.waiting and any(p.grad is not None for p in look.waiting)):
        look = attributes[_KEY] = _Look(count, [], look.warned if look else set())
        # An optimizer around another one leaves the step to that.
        if not any(isinstance(value, Optimizer) for value in attributes.values()):
            _warn(optimizer, look)


# Dynamo cannot trace weak references. torch.compiler.disable would import Dynamo here, which takes as long as torch itself.
_look_untraced = torch._disable_dynamo(_look_at)


def _warn(optimizer: Optimizer, look: _Look) -> None:
    points = {getattr(parts, "original", None): parts for parts in _points}  # FSDP1 takes the attribute away
    moved: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("names") or group.get("param_names")
        for i, p in enumerate(group["params"]):
            if p not in points or id(p) in look.warned or _geoopt_keeps(optimizer, p):
                continue
            if p.grad is None:
                look.waiting.append(p)
            else:
                look.warned.add(id(p))
                moved.append(str(names[i] if names else points[p].label))
    if moved:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        named = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
        warnings.warn(
            f"{kind} moved {named} without its manifold: the columns stop being orthonormal. Use "
            "manifold_tying.optim.RiemannianAdam(model.parameters()), which is AdamW for all other parameters, or what any "
            "optimizer can train: manifold_tying.orthogonal in place of stiefel, PIT(memory='free') in place of another "
            "memory. For an unconstrained weight, call manifold_tying.materialize(model)",
            stacklevel=5,  # two functions here, the hook, torch's wrapper of step, the caller
        )


def _geoopt_keeps(optimizer: Optimizer, p: Tensor) -> bool:
    """geoopt's optimizers follow the manifold of its own class of parameters only."""
    return isinstance(optimizer, geoopt.optim.mixin.OptimMixin) and isinstance(p, geoopt.ManifoldParameter)
