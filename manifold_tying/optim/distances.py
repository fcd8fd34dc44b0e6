"""How far constrained weights of a model are from their manifolds."""

import math
from typing import Any, cast

import torch
from torch import nn

from manifold_tying import distributed
from manifold_tying.parametrizations import points
from manifold_tying.poet import deviation, equivalences


@torch.no_grad()
def drift(module: nn.Module) -> dict[str, float]:
    """The distance of each weight from its manifold, by the weight's name; in float32 rounding is about 1e-7.

    For a point X, or the base of a Cayley map, it is ‖X - projx(X)‖_F / ‖X‖_F; the distances of several points under one weight
    are added as squares. For a weight R W0 P of POET it is the largest ‖GᵀG - I‖₂ of the blocks of R and P since the last
    merge, which a series (``terms=k``) makes large; an adapter of PoetConfig is listed by the names of its layer and its own.
    All are infinite for NaN, Inf, a point without a nearest one (a zero row on a sphere), and overflow. Other maps cannot leave
    the manifold and are not listed. Collective for sharded points.

    Raises:
        ValueError: such a weight is on the meta device.

    >>> drift(mt.stiefel(nn.Linear(16, 64)))["weight"] < 1e-6
    True
    """
    distributed.reshard_fsdp(module)
    on_manifolds = list(points(module))
    rotated = [(name, part.spec, skew) for name, part, skew in equivalences(module)]
    for path, layer in module.named_modules():
        for adapter in getattr(layer, "poet_skew", ()):  # of PoetConfig
            skew, spec, factor = cast(Any, layer).rotation(adapter)
            rotated.append((f"{path}.{adapter}", spec, skew * factor))
    stored = [(name, X) for name, X, *_ in on_manifolds] + [(name, skew) for name, _, skew in rotated]
    if unknown := [name for name, tensor in stored if tensor.is_meta]:
        raise ValueError(f"expected weights in memory, but {', '.join(unknown)} are on the meta device; load them")
    found: dict[str, float] = {}
    for name, point, manifold in on_manifolds:
        X = distributed.full_tensor(point)
        off = math.inf
        if X.isfinite().all():
            size = torch.linalg.vector_norm(X).clamp_min(torch.finfo(X.dtype).tiny)
            off = float(torch.linalg.vector_norm(X - manifold.projx(X)) / size)
        found[name] = math.hypot(found.get(name, 0.0), off)
    for name, spec, skew in rotated:
        found[name] = deviation(spec, distributed.full_tensor(skew))
    return {name: off if math.isfinite(off) else math.inf for name, off in found.items()}
