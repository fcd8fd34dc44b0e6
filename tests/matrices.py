"""Matrices with known factors, and the factors by scipy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def orthonormal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0]


def conditioned(shape: tuple[int, ...], condition: float = 10.0, seed: int = 0) -> Tensor:
    """A float64 matrix (..., n, p) with singular values spread evenly, in logarithms, from 1 to 1/condition."""
    torch.manual_seed(seed)
    *batch, n, p = shape
    h = torch.logspace(0, -math.log10(condition), p, dtype=torch.float64)
    return (orthonormal(*batch, n, p) * h) @ orthonormal(*batch, p, p).mT


def scipy_polar(Y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Polar factors of a batch, in float64 and with the scale taken out."""
    flat = Y.double().reshape(-1, *Y.shape[-2:]).numpy()
    scale = max(np.abs(flat).max(), 1e-300)
    pairs = [scipy.linalg.polar(y / scale) for y in flat]
    U, H = (np.stack(parts).reshape(*Y.shape[:-2], -1, Y.shape[-1]) for parts in zip(*pairs, strict=True))
    return U, H * scale


def decompositions(run: Callable[[], Any]) -> set[str]:
    """The torch.linalg operators, such as ``_linalg_eigh``, that a call runs: none if it gets by with products."""
    names: set[str] = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Record():
        run()
    return {name for name in names if name.startswith(("linalg_", "_linalg_")) and "norm" not in name}
