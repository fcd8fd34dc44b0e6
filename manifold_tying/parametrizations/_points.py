"""Tags tensors with their manifold, and warns when an optimizer without manifolds takes its first step on one."""

import uuid
import warnings
from collections.abc import Callable
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from manifold_tying._geoopt import geoopt

_WARNED = "_points_warned_of"  # attribute set on the optimizer; not pickled


class _Holder:
    """What owns a point: its layer, or another's parametrization; and the point's label in messages, all that copies keep."""

    def __init__(
        self, label: str, layer: ref[nn.Module] | None = None, name: str = "", others: ref[nn.Module] | None = None
    ) -> None:
        self.label, self.layer, self.name, self.others = label, layer, name, others

    def __reduce__(self) -> Any:
        return _Holder, (self.label,)

    def is_released(self, tensor: Tensor) -> bool:
        """Whether the constraint was removed, so that the tensor is its layer's plain parameter again."""
        if self.others is not None:
            return self.others() is None
        layer = None if self.layer is None else self.layer()
        return layer is not None and layer._parameters.get(self.name) is tensor


def manifold_in(parts: ParametrizationList) -> geoopt.Manifold | None:
    """The manifold that a parametrization declares its stored tensor a point of, by an attribute ``manifold``."""
    manifold = getattr(parts[0], "manifold", None) if len(parts) else None
    return manifold if isinstance(manifold, geoopt.Manifold) and not isinstance(manifold, geoopt.Euclidean) else None


_points_exist = False


class PointList(ParametrizationList):
    """Parametrization list whose stored tensor is tagged with its manifold.

    The tag is an attribute of the tensor: copying, loading, casting and sharding replace the tensor and lose it.
    """

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        mark(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "original":
            mark(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        mark(self)
        return self

    def right_inverse(self, value: Tensor) -> None:
        super().right_inverse(value)
        mark(self)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        mark(self)


def _watch_registration(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Tag the points of parametrizations that others register by torch's register_parametrization."""
    if type(part) is ParametrizationList and isinstance(part._parameters.get("original"), Tensor):
        if manifold_in(part) is not None:
            part.__class__ = PointList
            mark(part)


register_module_module_registration_hook(_watch_registration)


_layers: WeakKeyDictionary[ParametrizationList, tuple[ref[nn.Module], str]] = WeakKeyDictionary()


def mark(parts: ParametrizationList) -> None:
    """Tag the stored tensor with its manifold, if it has one, which ``RiemannianAdam(model.parameters())`` reads.

    The stored tensor is not a ``geoopt.ManifoldParameter``, the only class that geoopt's optimizers recognize: FSDP2 and
    ``.to_empty()`` replace it by a plain parameter, and torch.load rejects it with ``weights_only=True``.
    """
    global _points_exist
    if (manifold := manifold_in(parts)) is not None:
        point: Any = parts.original
        label = getattr(parts, "label", f"a point of shape {tuple(point.shape)}")
        owner = (*_layers[parts], None) if parts in _layers else (None, "", ref(parts))
        point.manifold, point.holder = manifold, _Holder(label, *owner)
        _points_exist = True


def set_owner(parts: ParametrizationList, layer: nn.Module, name: str) -> None:
    """Record the layer that owns the constraint's tensor; call it before :func:`mark`."""
    _layers[parts] = ref(layer), name


def unmark(tensor: Tensor) -> None:
    for name in ("manifold", "holder"):
        tensor.__dict__.pop(name, None)


def stamp(tensor: Tensor) -> None:
    """Mark a parameter that was constrained or materialized: a Riemannian optimizer drops the moments that it had before.

    A pickled parameter keeps its stamp, so no other process may draw the same one.
    """
    tensor.__dict__["stamp"] = uuid.uuid4().hex


def stamp_of(tensor: Tensor) -> str | None:
    """The parameter's last :func:`stamp`; None if it has none, as in a copy."""
    return tensor.__dict__.get("stamp")


def manifold_of(tensor: Tensor) -> geoopt.Manifold | None:
    """The manifold of a constrained tensor or geoopt.ManifoldParameter; None for others, and once the constraint is removed."""
    manifold, holder = getattr(tensor, "manifold", None), getattr(tensor, "holder", None)
    return None if isinstance(manifold, geoopt.Euclidean) or (holder and holder.is_released(tensor)) else manifold


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "follows_manifolds", False):
        return
    if not torch.compiler.is_compiling():
        _check_optimizer(optimizer)
    elif _points_exist:
        _check_untraced(optimizer)


def _check_optimizer(optimizer: Optimizer) -> None:
    attributes = vars(optimizer)
    if any(isinstance(value, Optimizer) for value in attributes.values()):
        return  # a wrapper: the wrapped optimizer runs the hook itself
    warned = attributes.setdefault(_WARNED, set())
    moved: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("names") or group.get("param_names")
        for i, p in enumerate(group["params"]):
            if p.grad is None or id(p) in warned or manifold_of(p) is None or _retracts(optimizer, p):
                continue
            warned.add(id(p))
            label = p.holder.label if hasattr(p, "holder") else f"a geoopt.ManifoldParameter of shape {tuple(p.shape)}"
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


def _retracts(optimizer: Optimizer, p: Tensor) -> bool:
    """Whether a geoopt optimizer steps p on its manifold: only for its own parameter class."""
    return isinstance(optimizer, geoopt.optim.mixin.OptimMixin) and isinstance(p, geoopt.ManifoldParameter)
