"""Dimensions in another order: which rotate, and where they came from."""

from typing import NamedTuple

import torch
from torch import Tensor

from manifold_tying import linalg


class Orders(NamedTuple):
    """All rows and columns of W, those that rotate first, and the way back; empty where none rotates."""

    rows: Tensor
    columns: Tensor
    rows_back: Tensor
    columns_back: Tensor

    @classmethod
    def of(cls, rows: Tensor, m: int, columns: Tensor, n: int) -> "Orders":
        """From those that rotate, block after block; the others come after them as they lie."""
        rows, columns = _completed(rows, m), _completed(columns, n)
        return cls(rows, columns, _inverse(rows), _inverse(columns))


def take(x: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """Columns of x (..., n), as index_select does it in twice the time on a CPU."""
    if x.dtype.itemsize == 2 and x.is_floating_point() and x.device.type == "cpu" and not linalg.is_traced():
        # On a CPU the operation itself would take these by way of float32.
        bits = take(x.view(torch.int16), order, None if out is None else out.view(torch.int16))
        return bits.view(x.dtype)
    return torch.gather(x, -1, order.expand(*x.shape[:-1], -1), out=out)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


def _completed(order: Tensor, n: int) -> Tensor:
    if len(order) in (0, n):
        return order
    others = torch.ones(n, dtype=torch.uint8, device=order.device).index_fill(0, order, 0)
    return torch.cat([order, others.argsort(descending=True, stable=True)[: n - len(order)]])
