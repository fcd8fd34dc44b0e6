"""Points of a module: finding them, projecting them to their manifolds, and warning of those that are off."""

import warnings
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from manifold_tying import autograd, distributed
from manifold_tying._geoopt import geoopt
from manifold_tying.parametrizations._orthonormal import CayleyFactor
from manifold_tying.parametrizations._points import manifold_of, manifolds_in

M = TypeVar("M", bound=nn.Module)
OFF = 1e-3  # an optimizer refuses a point that is further off, too


def points(module: nn.Module) -> Iterator[tuple[str, Tensor, geoopt.Manifold]]:
    """(full name of the weight, stored tensor, manifold) of every point in module.

    Points of this package, of others' parametrizations with a ``manifold``, geoopt.ManifoldParameters, bases of Cayley maps.
    """
    for prefix, owner in module.named_modules():
        if not isinstance(owner, ParametrizationList):
            lists = cast(nn.ModuleDict | dict[str, nn.Module], getattr(owner, "parametrizations", {}))
            found: list[tuple[str, Tensor | None, geoopt.Manifold | None]] = [
                (name, getattr(parts, key, None), manifold)
                for name, parts in lists.items()
                for key, manifold in manifolds_in(cast(ParametrizationList, parts)).items()
            ]
            found += [(name, p, manifold_of(p, {})) for name, p in owner.named_parameters(recurse=False)]
            for name, parts in lists.items():
                found += [(name, part.base, part.bases) for part in parts.children() if isinstance(part, CayleyFactor)]
            for name, tensor, manifold in found:
                if tensor is not None and manifold is not None:
                    yield (f"{prefix}.{name}" if prefix else name), tensor, manifold


@torch.no_grad()
def project(module: M) -> M:
    """Project every point of ``module`` to its manifold, in place, and return the module; other parameters keep their values.

    For points that something other than their optimizer has moved: an average of weights (SWA, EMA, a merge of checkpoints)
    lies off the manifold. Points are what ``stiefel`` and ``PIT(memory="trainable")`` store, tensors under any parametrization
    with an attribute ``manifold``, and ``geoopt.ManifoldParameter``; and the bases of the Cayley maps of ``orthogonal``.

    Raises:
        ValueError: a point contains NaN or Inf; nothing is changed.

    >>> layer = mt.stiefel(nn.Linear(16, 64))
    >>> average = torch.optim.swa_utils.AveragedModel(layer)
    >>> project(average) is average
    True
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"expected a module, got {type(module).__name__}; project a tensor by its manifold's projx")
    distributed.reshard_fsdp(module)
    found = list(points(module))
    if bad := [name for name, point, _ in found if not bool(torch.isfinite(distributed.to_local(point)).all())]:
        raise ValueError(f"expected finite points, but {', '.join(bad)} contain NaN or Inf; nothing was projected")
    for name, point, manifold in found:
        if not bool(torch.isfinite(distributed.to_local(manifold.projx(point))).all()):
            raise ValueError(
                f"{name} has no nearest point of {manifold}, such as a zero row on a sphere; nothing was projected"
            )
    for _, point, manifold in found:  # again: all projections at once may not fit into memory
        point.copy_(manifold.projx(point))
    return module


@torch.no_grad()
def warn_if_off(module: nn.Module) -> None:
    """Warn about points that are more than 1e-3 off their manifolds, as averages are."""
    off = []
    for name, point, manifold in points(module):
        if autograd.has_data(point):
            ok, reason = manifold.check_point_on_manifold(point.detach(), atol=OFF, rtol=OFF, explain=True)
            off += [] if ok else [f"{name} ({reason})"]
    if off:
        warnings.warn(
            f"off the manifold: {'; '.join(off[:5])}{f' and {len(off) - 5} more' if len(off) > 5 else ''}. Are they averages "
            "(SWA, EMA), or written in place? manifold_tying.project(model) returns them to it",
            stacklevel=3,
        )
