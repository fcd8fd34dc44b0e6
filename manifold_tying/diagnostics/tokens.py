"""Diagnostics of single tokens: nearest anchors, and drift between checkpoints."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying.diagnostics.bases import table_blocks

_QUERIES = 1024  # tokens per block of similarities to the vocabulary


class Anchors(NamedTuple):
    """The nearest tokens of each state, nearest first."""

    ids: Tensor  # (n, k), int64
    cosines: Tensor  # (n, k), float64


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """How far tokens moved between two tables."""

    tokens: Tensor  # (n,), int64
    cosines: Tensor  # (n,), float64: between a token's vector before and after
    neighbours_kept: Tensor  # (n,), float64: share of the k nearest other tokens that stay among them


def nearest_anchors(states: Tensor, anchors: Tensor, k: int = 1) -> Anchors:
    """The k anchors (V, d) with the largest cosine to each state (n, d), in float64, in blocks of anchors.

    Input-side anchors are the rows of E, output-side anchors the columns of W_out, passed as W_outᵀ. The head ranks the columns
    differently, because the logits h W_out also depend on their lengths. A zero anchor or state has cosine 0.
    """
    if states.ndim != 2 or anchors.ndim != 2 or states.shape[1] != anchors.shape[1]:
        shapes = f"{tuple(states.shape)} and {tuple(anchors.shape)}"
        raise ValueError(f"expected states (n, d) and anchors (V, d), got {shapes}")
    if not 1 <= k <= len(anchors):
        raise ValueError(f"expected k in [1, {len(anchors)}], got {k}")
    directions = _directions(states.detach().double())
    ids = torch.zeros(len(states), 0, dtype=torch.int64, device=states.device)
    cosines = torch.zeros(len(states), 0, dtype=torch.float64, device=states.device)
    start = 0
    for block in table_blocks(anchors):
        found, places = (directions @ _directions(block).mT).topk(min(k, len(block)))
        cosines, ids = torch.cat([cosines, found], 1), torch.cat([ids, places + start], 1)
        cosines, order = cosines.topk(min(k, cosines.shape[1]))
        ids = ids.gather(1, order)
        start += len(block)
    return Anchors(ids, cosines)


def token_drift(before: Tensor, after: Tensor, *, tokens: Tensor | None = None, neighbours: int = 5) -> TokenDrift:
    """How far tokens moved between two tables (V, d) of one vocabulary, such as E or W_outᵀ of two checkpoints.

    The cosine counts a common rotation of hidden space as drift. The neighbours do not: they show whether a token keeps its
    meaning relative to the others.

    Args:
        before: the first table.
        after: the second table.
        tokens: ids (n,); None takes all, at O(V² d) operations. Pass a sample of a large vocabulary.
        neighbours: number of nearest other tokens to compare.
    """
    if before.shape != after.shape or before.ndim != 2:
        raise ValueError(f"expected two tables of one shape (V, d), got {tuple(before.shape)} and {tuple(after.shape)}")
    if not 1 <= neighbours < len(before):
        raise ValueError(f"expected neighbours in [1, {len(before) - 1}], got {neighbours}")
    tokens = torch.arange(len(before), device=before.device) if tokens is None else tokens
    if tokens.dtype != torch.int64 or tokens.ndim != 1 or not ((tokens >= 0) & (tokens < len(before))).all():
        found = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise ValueError(f"expected int64 token ids (n,) in [0, {len(before)}), got {found}")
    cosines, kept = [], []
    for part in tokens.split(_QUERIES):
        first, second = before[part], after[part]
        cosines.append((_directions(first.detach().double()) * _directions(second.detach().double())).sum(1))
        near = _others(first, before, part, neighbours), _others(second, after, part, neighbours)
        kept.append((near[0][:, :, None] == near[1][:, None, :]).any(2).double().mean(1))
    none = torch.zeros(0, dtype=torch.float64, device=before.device)
    return TokenDrift(tokens, torch.cat([none, *cosines]), torch.cat([none, *kept]))


def _others(states: Tensor, table: Tensor, own: Tensor, k: int) -> Tensor:
    """The k nearest tokens to each token other than itself, (n, k); its duplicates count."""
    ids = nearest_anchors(states, table, k + 1).ids
    is_own = ids == own[:, None]
    is_own[:, -1] |= ~is_own.any(1)  # if over k duplicates crowd it out, drop the last one instead
    return ids[~is_own].view(len(own), k)


def _directions(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, eps=1e-300)  # zero stays zero
