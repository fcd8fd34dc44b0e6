"""Dimensions in another order: which rotate, and where they came from."""

import torch
from torch import Tensor


def take(x: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """Columns of x (..., n), as index_select does it in twice the time on a CPU."""
    if x.dtype.itemsize == 2 and x.is_floating_point() and x.device.type == "cpu" and not torch.compiler.is_compiling():
        # On a CPU the operation itself would take these by way of float32.
        bits = take(x.view(torch.int16), order, None if out is None else out.view(torch.int16))
        return bits.view(x.dtype)
    return torch.gather(x, -1, order.expand(*x.shape[:-1], -1), out=out)


def put(x: Tensor, w: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """x (..., n) with w (..., covered) in the places of ``order``; not in place."""
    if len(order) == x.shape[-1]:
        return take(w, inverse(order), out)
    places = order.expand_as(w)
    return x.scatter(-1, places, w) if out is None else out.copy_(x).scatter_(-1, places, w)


def completed(order: Tensor, n: int) -> Tensor:
    """The n dimensions, those of ``order`` first and the others after them as they come."""
    if len(order) == n:
        return order
    others = torch.ones(n, dtype=torch.uint8, device=order.device).index_fill_(0, order, 0)
    return torch.cat([order, others.argsort(descending=True, stable=True)[: n - len(order)]])


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
