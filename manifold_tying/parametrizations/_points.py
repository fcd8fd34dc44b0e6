"""Which tensors are points of which manifold; warns when an optimizer without manifolds takes its first step on one."""

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from manifold_tying._geoopt import geoopt

_WARNED = "_points_warned_of"  # attribute set on the optimizer; not pickled
_lists: WeakSet["KnownList"] = WeakSet()
_lists_exist = False


class KnownList(ParametrizationList):
    """Parametrization list in the record of all lists: it says what its stored tensors are.

    Tensors carry no mark of their own: copying, loading, casting and sharding replace them.
    """

    tensor_name: str  # of what it parametrizes

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        record(self)


def record(parts: Any) -> None:
    """Record a list that says what its stored tensors are."""
    global _lists_exist
    _lists.add(parts)
    _lists_exist = True


def manifolds_in(parts: ParametrizationList) -> dict[str, geoopt.Manifold]:
    """The manifolds that a parametrization declares its stored tensors points of, by the stored tensors' names.

    It declares them by an attribute ``manifold``, or, if it stores several tensors, by ``manifolds``, with None for the free.
    """
    first: Any = parts[0] if len(parts) else None
    declared = {"original": getattr(first, "manifold", None)}
    declared |= {f"original{i}": manifold for i, manifold in enumerate(getattr(first, "manifolds", ()))}
    return {
        name: manifold
        for name, manifold in declared.items()
        if isinstance(manifold, geoopt.Manifold) and not isinstance(manifold, geoopt.Euclidean)
    }


Homes = dict[int, tuple[KnownList, str]]


def homes() -> Homes:
    """List and name by the id of each parametrized tensor. Pass it to the functions below when asking about many tensors."""
    return {id(tensor): (parts, name) for parts in _lists for name, tensor in parts._parameters.items()}


def home_of(tensor: Tensor, known: Homes) -> nn.Module | None:
    """What says that a tensor is stored by a parametrization or is a point: its list, or the manifold it has itself."""
    return known[id(tensor)][0] if id(tensor) in known else getattr(tensor, "manifold", None)


def is_removed(home: nn.Module | None) -> bool:
    """Whether a tensor that is no longer at ``home`` became plain: its parametrization, or its own manifold, was removed."""
    return home is not None and home not in _lists


def manifold_of(tensor: Tensor, known: Homes | None = None) -> geoopt.Manifold | None:
    """The manifold of a constrained tensor or geoopt.ManifoldParameter; None for others."""
    parts, name = (homes() if known is None else known).get(id(tensor), (None, ""))
    manifold = getattr(tensor, "manifold", None) if parts is None else manifolds_in(parts).get(name)
    return None if isinstance(manifold, geoopt.Euclidean) else manifold


def _watch_registration(module: Any, name: str, part: Any) -> None:
    """Record the parametrizations that others register by torch's register_parametrization."""
    kind = type(part)
    if kind is ParametrizationList and manifolds_in(part):
        part.__class__, part.tensor_name = KnownList, name
        record(part)


def _watch_removal(module: Any, layer_name: str, p: Tensor | None) -> None:
    """Forget a list whose stored tensor remove_parametrizations has made the plain parameter of its layer."""
    if p is not None and "parametrizations" in module._modules and id(p) in (known := homes()):
        parts, name = known[id(p)]
        if layer_name == parts.tensor_name and layer_name not in module._parameters:  # not another name for the point
            _lists.discard(parts)
            del parts._parameters[name]  # an optimizer may hold the list, which must not look like a tie


register_module_module_registration_hook(_watch_registration)
register_module_parameter_registration_hook(_watch_removal)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "follows_manifolds", False):
        return
    if not torch.compiler.is_compiling():
        _check_optimizer(optimizer)
    elif _lists_exist:
        _check_untraced(optimizer)


def _check_optimizer(optimizer: Optimizer) -> None:
    attributes = vars(optimizer)
    if any(isinstance(value, Optimizer) for value in attributes.values()):
        return  # a wrapper: the wrapped optimizer runs the hook itself
    warned = attributes.setdefault(_WARNED, set())
    moved: list[str] = []
    known = homes()
    for group in optimizer.param_groups:
        names = group.get("names") or group.get("param_names")
        for i, p in enumerate(group["params"]):
            if p.grad is None or id(p) in warned or manifold_of(p, known) is None:
                continue
            if isinstance(optimizer, geoopt.optim.mixin.OptimMixin) and isinstance(p, geoopt.ManifoldParameter):
                continue  # geoopt steps only its own parameter class on its manifold
            warned.add(id(p))
            kind = "a point" if id(p) in known else "a geoopt.ManifoldParameter"
            label = getattr(known.get(id(p), [None])[0], "label", f"{kind} of shape {tuple(p.shape)}")
            moved.append(str(names[i] if names else label))
    if moved:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        named = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
        warnings.warn(
            f"{kind} moved {named} without its manifold, so it leaves it. Use "
            "manifold_tying.optim.RiemannianAdam(model.parameters()), which is AdamW for all other parameters, or a "
            "constraint that any optimizer trains: manifold_tying.orthogonal in place of stiefel, PIT(memory='free') in place "
            "of another memory. For an unconstrained weight, call manifold_tying.materialize(model)",
            stacklevel=4,  # this function, the hook, torch's wrapper of step, the caller
        )


register_optimizer_step_post_hook(_after_step)
# Dynamo cannot trace weak references; torch.compiler.disable would import Dynamo, which doubles the import time of torch.
_check_untraced = torch._disable_dynamo(_check_optimizer)
