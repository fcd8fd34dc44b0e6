"""The tokens nearest to a state."""

from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying.diagnostics.bases import table_blocks


class Anchors(NamedTuple):
    """The nearest tokens of each state, nearest first."""

    ids: Tensor  # (n, k), int64
    cosines: Tensor  # (n, k), float64


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


def _directions(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, eps=1e-300)  # zero stays zero
