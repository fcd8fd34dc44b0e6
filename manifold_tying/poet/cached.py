"""The weights of many linear layers with W = R W0 P at once."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import distributed, precision
from manifold_tying.parametrizations import constraints, parametrized
from manifold_tying.poet.linear import plain_weight
from manifold_tying.poet.parametrization import Equivalence, version_of
from manifold_tying.poet.rotation import matmul_dtype
from manifold_tying.poet.spec import Permutations


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Compute W = R W0 P of the model's linear layers on entry, all of one shape together, and use them until the exit.

    On a GPU a model of many small layers waits for its host, which launches some twenty kernels for each layer. This takes
    about a hundred for all layers of one shape, and each layer then is a product with its W, in autocast's dtype. The weights
    and their gradients need as much memory as plain layers'. Enter it for each forward, within autocast. The backward may
    follow the exit, unless activations are checkpointed. The model may be compiled; this function is not.

    Sharded layers are left out, and calls with other vectors: those of functional_call, and of a step or merge since the entry.
    A single wide layer with small blocks rotates its activations in fewer operations.

    >>> from manifold_tying import equivalence
    >>> model = nn.Sequential(*(equivalence(nn.Linear(8, 8), block_size=4) for _ in range(3)))
    >>> with cached_weights(model):
    ...     y = model(torch.ones(2, 8))
    >>> y.sum().backward()
    """
    groups = defaultdict[Any, list[tuple[Equivalence, Tensor]]](list)
    for _, owner, name in constraints(model):
        known = parametrized(owner)[name]
        if isinstance(owner, nn.Linear) and isinstance(part := known[0], Equivalence):
            if not distributed.is_dtensor(stored := known.original):
                groups[part.spec, part.dtype, stored.dtype, stored.device].append((part, stored))
    try:
        for (spec, *_), found in groups.items():
            parts, vectors = zip(*found, strict=True)
            dtype = precision.autocast_dtype(parts[0].ordered_base)
            with precision.disable_autocast(parts[0].ordered_base.device):  # it stacks no other 16-bit dtype
                places = zip(*(part.places for part in parts), strict=True)
                perms = Permutations.of(*map(torch.stack, places))
                bases = torch.stack([part.ordered_base for part in parts])
                weights = plain_weight(bases, torch.stack(vectors), spec, perms, matmul_dtype(dtype)).to(dtype)
            for (part, stored), weight in zip(found, weights.unbind(), strict=True):
                part.cached = stored, version_of(stored), weight
        yield
    finally:
        for part in (part for found in groups.values() for part, _ in found):
            part.cached = None
