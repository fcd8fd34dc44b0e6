"""Bases of tall tables, angles and nearest rows, in blocks of rows: no float64 copy of a table."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import precision

_BLOCK_ENTRIES = 2**22  # a block of rows in float64: 32 MiB
# Smallest accepted ratio of singular values; the error of a polar factor is float64's rounding divided by it.
_LEAST_RATIO = 1e-10


def table_blocks(table: Tensor) -> Iterator[Tensor]:
    """The rows of a table (V, d) in float64, in blocks of at least 4 d rows."""
    d = table.shape[1]
    for block in table.detach().split(max(4 * d, _BLOCK_ENTRIES // d)):
        yield block.double()


def check_table(table: Tensor, name: str) -> None:
    """ValueError unless the table is floating, finite and (V, d) with V >= d >= 1."""
    if table.ndim != 2:
        raise ValueError(f"expected {name} (V, d), got {tuple(table.shape)}")
    precision.check_tall(table, name)
    precision.check_finite(table)


def polar_scale(table: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """H and H⁻¹, float64 (d, d), of the polar decomposition table = U H, so that U = table H⁻¹.

    H comes from a QR factorization of row blocks; the Gram matrix would square the condition number. Raises ValueError
    without full column rank, because U is then not unique.
    """
    R = torch.zeros(0, table.shape[1], dtype=torch.float64, device=table.device)
    for rows in table_blocks(table):
        R = torch.linalg.qr(torch.cat([R, rows]), mode="r")[1]
    _, h, Vh = torch.linalg.svd(R)
    if not h[-1] > _LEAST_RATIO * h[0]:
        raise ValueError(
            f"expected {name} of full column rank, got singular values from {h[-1]:.1e} to {h[0]:.1e}: its polar factor is "
            "not unique. Look for zero, constant or duplicate columns"
        )
    return precision.sym((Vh.mT * h) @ Vh), precision.sym((Vh.mT / h) @ Vh)


def vector_angles(a: Tensor, b: Tensor) -> Tensor:
    """Angles between the vectors a and b (..., d), as 2 atan2(‖â - b̂‖, ‖â + b̂‖): (...), float64, exact at 0 and at π.

    NaN if one vector is zero. (Kahan.)
    """
    a, b = (v.detach().double() for v in (a, b))
    a, b = (v / v.abs().amax(-1, keepdim=True) for v in (a, b))  # the norm of tiny numbers underflows
    a, b = (v / torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (a, b))
    return 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))


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
    directions = normalized(states.detach().double())
    ids = torch.zeros(len(states), 0, dtype=torch.int64, device=states.device)
    cosines = torch.zeros(len(states), 0, dtype=torch.float64, device=states.device)
    start = 0
    for block in table_blocks(anchors):
        found, places = (directions @ normalized(block).mT).topk(min(k, len(block)))
        cosines, ids = torch.cat([cosines, found], 1), torch.cat([ids, places + start], 1)
        cosines, order = cosines.topk(min(k, cosines.shape[1]))
        ids = ids.gather(1, order)
        start += len(block)
    return Anchors(ids, cosines)


def normalized(rows: Tensor) -> Tensor:
    """Rows of norm 1; zero stays zero."""
    return torch.nn.functional.normalize(rows, eps=1e-300)
