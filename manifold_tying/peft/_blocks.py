"""Orthogonal blocks of one layer, or of all layers of a model by one map for all blocks of a size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import autograd, precision
from manifold_tying.poet import Blocks, RotationSpec, both_blocks, orthogonal, version_of

Rotation = tuple[Tensor, RotationSpec, float]
"""A vector of stored numbers, the sizes of its blocks, and the factor that makes the numbers skew entries."""

Known = dict[Rotation, tuple[int, tuple[Blocks, Blocks]]]
"""Version of the vector, and blocks of R and P, for each rotation."""

_known = ContextVar[Callable[[], Known]]("blocks of a model's layers in a call", default=dict)


def blocks_of(rotation: Rotation) -> tuple[Blocks, Blocks]:
    """Blocks of R and of P; without gradients those of the :func:`batched` call around, if the vector is as it was.

    With gradients each layer has a graph of its own: others free, checkpoint, shard and reduce layers one by one.
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling() or autograd.in_transform()):
        version, known = _known.get()().get(rotation, (0, None))
        if known is not None and version == version_of(rotation[0]):
            return known
    vector, spec, factor = rotation
    with precision.full_precision(vector.device):
        wide = vector.to(precision.compute_dtype(vector.dtype))
        return both_blocks(spec, wide if factor == 1 else wide * factor)


def all_blocks(rotations: Sequence[Rotation]) -> list[tuple[Blocks, Blocks]]:
    """Blocks of R and of P of each rotation."""
    groups: dict[Any, list[Tensor]] = {}
    keys: list[tuple[list[Any], list[Any]]] = []
    for vector, spec, factor in rotations:
        keys.append(([], []))
        for side, of_side, entries in zip((spec.R, spec.P), keys[-1], spec.split(vector), strict=True):
            for v, b in side.split(entries):
                of_side.append((b, spec.terms, factor, v.dtype, v.device))
                groups.setdefault(of_side[-1], []).append(v)
    found = {}
    for key, vectors in groups.items():
        b, terms, factor, dtype, device = key
        with precision.full_precision(device):
            wide = torch.cat(vectors).to(precision.compute_dtype(dtype)) * factor
            found[key] = iter(orthogonal(wide, b, terms).split([len(v) for v in vectors]))
    return [([next(found[key]) for key in R], [next(found[key]) for key in P]) for R, P in keys]


@contextmanager
def batched(rotations: Callable[[], Iterable[Rotation]]) -> Iterator[None]:
    """Until the exit, :func:`blocks_of` computes the blocks of all rotations at its first call without gradients."""
    if torch.compiler.is_compiling():
        yield
        return

    @cache
    def known() -> Known:
        whole = [
            each for each in rotations() if type(each[0]) is nn.Parameter and each[0].numel() == each[1].num_params
        ]
        found = zip(whole, all_blocks(whole), strict=True)
        return {rotation: (version_of(rotation[0]), blocks) for rotation, blocks in found}

    token = _known.set(known)
    try:
        yield
    finally:
        _known.reset(token)
