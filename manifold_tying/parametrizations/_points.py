"""Which tensors are points of manifolds, and a warning at the first step that an optimizer without manifolds takes on one."""

import warnings
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from manifold_tying._geoopt import geoopt

_WARNED = "_points_warned_of"  # an optimizer's attribute, which it does not pickle


class _Holder:
    """Where a point is a layer's, and what to call it; a copy does not know its layer."""

    def __init__(self, label: str, layer: ref[nn.Module] | None = None, name: str = "") -> None:
        self.label, self.layer, self.name = label, layer, name

    def __reduce__(self) -> Any:
        return _Holder, (self.label,)

    def has_freed(self, tensor: Tensor) -> bool:
        """Whether the tensor is its layer's plain parameter again."""
        layer = None if self.layer is None else self.layer()
        return layer is not None and layer._parameters.get(self.name) is tensor


_layers: WeakKeyDictionary[ParametrizationList, tuple[ref[nn.Module], str]] = WeakKeyDictionary()


def mark(parts: ParametrizationList, manifold: geoopt.Manifold) -> None:
    """Note a point's manifold on the tensor itself, where ``RiemannianAdam(model.parameters())`` looks for it."""
    point: Any = parts.original
    point.manifold, point.holder = manifold, _Holder(getattr(parts, "label", "a point"), *_layers.get(parts, ()))
    _warn_after_steps()


def belongs(parts: ParametrizationList, layer: nn.Module, name: str) -> None:
    """Note whose tensor the constraint holds, before it is marked."""
    _layers[parts] = ref(layer), name


def unmark(tensor: Tensor) -> None:
    for name in ("manifold", "holder"):
        tensor.__dict__.pop(name, None)


def manifold_of(tensor: Tensor) -> geoopt.Manifold | None:
    """The manifold of a point, ours or a geoopt.ManifoldParameter; None for others, and once its constraint is taken off."""
    manifold, holder = getattr(tensor, "manifold", None), getattr(tensor, "holder", None)
    return None if isinstance(manifold, geoopt.Euclidean) or (holder and holder.has_freed(tensor)) else manifold


@cache
def _warn_after_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "follows_manifolds", False):
        (_look_untraced if torch.compiler.is_compiling() else _look)(optimizer)


def _look(optimizer: Optimizer) -> None:
    attributes = vars(optimizer)
    if any(isinstance(value, Optimizer) for value in attributes.values()):
        return  # an optimizer around another one leaves the step to that
    warned = attributes.setdefault(_WARNED, set())
    moved: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("names") or group.get("param_names")
        for i, p in enumerate(group["params"]):
            holder = getattr(p, "holder", None)
            if holder is None or p.grad is None or id(p) in warned or manifold_of(p) is None or _keeps(optimizer, p):
                continue
            warned.add(id(p))
            moved.append(str(names[i] if names else holder.label))
    if moved:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        named = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
        warnings.warn(
            f"{kind} moved {named} without its manifold: the columns stop being orthonormal. Use "
            "manifold_tying.optim.RiemannianAdam(model.parameters()), which is AdamW for all other parameters, or what any "
            "optimizer can train: manifold_tying.orthogonal in place of stiefel, PIT(memory='free') in place of another "
            "memory. For an unconstrained weight, call manifold_tying.materialize(model)",
            stacklevel=4,  # this function, the hook, torch's wrapper of step, the caller
        )


# Dynamo cannot trace weak references. torch.compiler.disable would import Dynamo here, which takes as long as torch itself.
_look_untraced = torch._disable_dynamo(_look)


def _keeps(optimizer: Optimizer, p: Tensor) -> bool:
    """geoopt's optimizers follow the manifold of its own class of parameters only."""
    return isinstance(optimizer, geoopt.optim.mixin.OptimMixin) and isinstance(p, geoopt.ManifoldParameter)
