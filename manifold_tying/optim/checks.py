"""Checks that the Riemannian optimizers run when a parameter group is added."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying import autograd, distributed, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Sphere, Stiefel
from manifold_tying.optim.rules import is_polar

Group = dict[str, Any]


def options_in(arguments: dict[str, Any]) -> Group:
    """The options of a group among the ``locals()`` of an optimizer's constructor."""
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "nonfinite", "__class__")}


def check_range(group: Group, **minimum: float) -> None:
    """ValueError unless every named option of the group is a number >= its minimum."""
    for name, low in minimum.items():
        if isinstance(group[name], Tensor) and group[name].numel() != 1:
            raise ValueError(f"expected {name} to be a number or a one-element tensor, got {tuple(group[name].shape)}")
        if not group[name] >= low:
            raise ValueError(f"expected {name} >= {low:g}, got {group[name]}")
    precision.check_int("project_every", group["project_every"], 1)


def check_point(p: Tensor, manifold: geoopt.Manifold, label: str, group: Group) -> None:
    """ValueError unless p lies on the manifold, in a dtype and a placement that a step can move."""
    ok, reason = manifold.check_point(p, explain=True)
    if not ok:
        raise ValueError(
            f"{label} has shape {tuple(p.shape)}, which is not a point of {manifold}: {reason}. FSDP1 and ZeRO-3 flatten "
            "parameters; use FSDP2, which keeps their shapes"
        )
    check_width(p, label)
    if type(manifold) is Stiefel:
        manifold.check_placement(p, label)
    elif type(manifold) is Sphere:
        distributed.check_row_sharding(p, label)
    elif distributed.is_dtensor(p):
        raise ValueError(f"{label} is a DTensor, which works on Stiefel and Sphere only, got {type(manifold).__name__}")
    if autograd.has_data(p):
        ok, reason = manifold.check_point_on_manifold(p.detach(), atol=1e-3, rtol=1e-3, explain=True)
        if not ok:
            raise ValueError(
                f"{label} is not on {manifold}: {reason}. Was it written in place, as nn.init does? Assign to the layer's "
                "weight instead, which projects, or call manifold_tying.project(model). In a parametrization of your own, an "
                "attribute `manifold` says that the stored tensor is a point"
            )
    if group.get("eps") == 0:
        raise ValueError(f"{label} needs eps > 0: a zero gradient would give 0 / 0")
    if group["project_every"] != 1 and not is_polar(manifold):
        raise ValueError(f"project_every > 1 works for Stiefel('polar') only, but {label} is on {manifold}")


def check_width(p: Tensor, label: str) -> None:
    """ValueError for a point in 16 bit, as the cast of a layer that was tied to it later leaves it."""
    if p.is_floating_point() and p.dtype.itemsize < 4:
        raise ValueError(f"{label} is {p.dtype}; keep points in float32 or wider and cast them where they are used")


def checked_scale(p: Tensor, scale: Tensor, name: str, manifold: geoopt.Manifold | None, group: Group) -> Tensor:
    """This rank's part of a group's "scale" for p, a point of ``manifold`` or an ordinary parameter (None)."""
    if not isinstance(scale, Tensor):
        raise ValueError(f"expected a tensor as the scale of {name}, got {scale!r}; for one factor, set the group's lr")
    scale = scale.detach().to(p.device, p.dtype.to_real())
    shape = p.shape if manifold is None else p.shape[-1:]
    if scale.shape != shape or (autograd.has_data(scale) and not (torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(
            f"expected a scale of {name} with the shape {tuple(shape)} and finite numbers >= 0, got one of "
            f"{tuple(scale.shape)} from {scale.min().item():g} to {scale.max().item():g}"
        )
    if manifold is not None and not isinstance(manifold, Stiefel):
        raise ValueError(f"a scale works for points of Stiefel only, but {name} is on {manifold}")
    if group["weight_decay"] != 0:
        raise ValueError(f"a scale needs weight_decay=0, got {group['weight_decay']} for {name}")
    return distributed.shard_like(scale, p) if manifold is None else scale
