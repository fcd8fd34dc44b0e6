"""Orthogonal blocks of one layer, or of all layers of a model by one map for all blocks of a size."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from manifold_tying import autograd, precision
from manifold_tying.poet import Blocks, RotationSpec, orthogonal, version_of

Rotation = tuple[Tensor, RotationSpec, float]
"""A vector of stored numbers, the sizes of its blocks, and the factor that makes the numbers skew entries."""

_known = ContextVar[dict[int, tuple[Tensor, int, bool, tuple[Blocks, Blocks]]]]("blocks of a model's layers in a call")


def blocks_of(rotation: Rotation) -> tuple[Blocks, Blocks]:
    """Blocks of R and of P; those of the :func:`batched` call around, if they are of this vector as it is now."""
    if torch.compiler.is_compiling() or autograd.in_transform():
        return all_blocks([rotation])[0]
    vector, nothing = rotation[0], (None, 0, False, None)
    of, version, has_grad, known = _known.get({}).get(id(vector), nothing)
    needs_grad = _needs_grad(vector)
    if known and of is vector and version == version_of(vector) and has_grad >= needs_grad:
        return known
    # A checkpoint around the layer compares what its two runs save for the backward. The second run is after that call and
    # comes here, so what is saved here must not count.
    with saved_tensors_hooks(lambda x: x, lambda x: x) if needs_grad else nullcontext():
        return all_blocks([rotation])[0]


def _needs_grad(vector: Tensor) -> bool:
    return vector.requires_grad and torch.is_grad_enabled()


def all_blocks(rotations: Sequence[Rotation]) -> list[tuple[Blocks, Blocks]]:
    """Blocks of R and of P of each rotation."""
    groups: dict[Any, list[Tensor]] = {}
    keys: list[tuple[list[Any], list[Any]]] = []
    for vector, spec, factor in rotations:
        keys.append(([], []))
        for side, of_side, entries in zip((spec.R, spec.P), keys[-1], spec.split(vector), strict=True):
            for v, b in side.split(entries):
                of_side.append((b, spec.terms, factor, v.dtype, v.device, v.requires_grad))
                groups.setdefault(of_side[-1], []).append(v)
    found = {}
    for key, vectors in groups.items():
        b, terms, factor, dtype, device, _ = key
        with precision.full_precision(device):
            wide = torch.cat(vectors).to(precision.compute_dtype(dtype)) * factor
            found[key] = iter(orthogonal(wide, b, terms).split([len(v) for v in vectors]))
    return [([next(found[key]) for key in R], [next(found[key]) for key in P]) for R, P in keys]


@contextmanager
def batched(rotations: Iterable[Rotation]) -> Iterator[None]:
    """Compute the blocks of all rotations together, and use them in calls of :func:`blocks_of` until the exit."""
    if torch.compiler.is_compiling() or autograd.in_transform():
        yield
        return
    whole = [each for each in rotations if type(each[0]) is nn.Parameter and each[0].numel() == each[1].num_params]
    found = zip(whole, all_blocks(whole), strict=True)
    token = _known.set({id(v): (v, version_of(v), _needs_grad(v), blocks) for (v, *_), blocks in found})
    try:
        yield
    finally:
        _known.reset(token)
