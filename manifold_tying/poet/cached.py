"""The weights of many linear layers with W = R W0 P at once."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import distributed, precision
from manifold_tying.parametrizations import constraints, parametrized
from manifold_tying.poet.linear import plain_weight
from manifold_tying.poet.parametrization import Equivalence
from manifold_tying.poet.rotation import matmul_dtype
from manifold_tying.poet.spec import Permutations


def cache_weights(model: nn.Module) -> int:
    """Compute W = R W0 P of the model's linear layers, all of one shape together, for a forward and its backward.

    On a GPU a model of many small layers waits for its host, which launches some twenty kernels for each layer. This takes
    about a hundred for all layers of one shape, and each layer then is a product with its W, in autocast's dtype. The weights
    and their gradients need as much memory as plain layers'. Call it within ``torch.nn.utils.parametrize.cached()``, which
    drops the weights at its end, and call ``backward`` within it as well if activations are recomputed.

    While gradients are needed, it leaves out layers that rotate activations in fewer operations than the product takes that
    is W's gradient: those with 6(m + n) b < 2mn. Sharded layers are left out, too.

    Returns:
        the number of weights.

    Raises:
        RuntimeError: outside of ``parametrize.cached()``.

    >>> from manifold_tying import equivalence
    >>> model = nn.Sequential(*(equivalence(nn.Linear(8, 8), block_size=4) for _ in range(3)))
    >>> with parametrize.cached():
    ...     _ = cache_weights(model)
    ...     model(torch.ones(2, 8)).sum().backward()
    """
    if not parametrize._cache_enabled:
        raise RuntimeError(
            "expected a call within `with torch.nn.utils.parametrize.cached():`, which drops the weights"
        )
    groups = defaultdict[Any, list[tuple[Equivalence, Tensor]]](list)
    for _, owner, name in constraints(model):
        part, stored = parametrized(owner)[name][0], parametrized(owner)[name].original
        if isinstance(owner, nn.Linear) and isinstance(part, Equivalence) and not distributed.is_dtensor(stored):
            if not (torch.is_grad_enabled() and part.spec.rotates_activations):
                groups[part.spec, part.dtype, stored.dtype, stored.device].append((part, stored))
    for (spec, *_), found in groups.items():
        parts, vectors = zip(*found, strict=True)
        dtype = precision.autocast_dtype(parts[0].ordered_base)
        perms = Permutations.of(*(torch.stack(sides) for sides in zip(*(part.places for part in parts), strict=True)))
        bases = torch.stack([part.ordered_base for part in parts])
        weights = plain_weight(bases, torch.stack(vectors), spec, perms, matmul_dtype(dtype)).to(dtype)
        for part, weight in zip(parts, weights.unbind(), strict=True):
            parametrize._cache[id(part), str(dtype)] = weight
    return sum(map(len, groups.values()))
