"""Skip contenders that would fail or run for hours."""

import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._harness import Unavailable

LIMIT = 20.0  # seconds per step of a peer, see Contender.limit
PATIENCE = 60.0  # seconds; a step that would take longer is not tried
LARGEST_SQUARE = 2e9  # bytes of an n x n matrix that a map forms for an n x p weight
_MEMINFO = Path("/proc/meminfo")


def refuse_low_precision(dtype: torch.dtype) -> None:
    """Raise Unavailable in bfloat16, which LAPACK does not support."""
    if dtype == torch.bfloat16:
        raise Unavailable("no bfloat16 kernels for its factorizations and solves")


def refuse_square(weight: Tensor) -> None:
    """Raise Unavailable if an n x n matrix for an n x p weight would exceed ``LARGEST_SQUARE``."""
    n, batch = max(weight.shape[-2:]), weight[..., 0, 0].numel()
    needed = batch * n * n * weight.dtype.itemsize
    if needed > LARGEST_SQUARE:
        raise Unavailable(f"would need {needed / 1e9:.1f} GB for each matrix of {n} x {n}")


def refuse_slow(flops: float, like: Tensor) -> None:
    """Raise Unavailable if the operations, at this device's matmul rate, would take longer than ``PATIENCE``."""
    if flops > 1e12:  # fewer are fast on any device
        seconds = flops / matmul_rate(like.device, like.dtype, 1024)
        if seconds > PATIENCE:
            raise Unavailable(f"would take about {seconds:.0f} s a step ({flops:.1e} operations)")


def refuse_large(needed: float, device: torch.device, what: str) -> None:
    """Raise Unavailable if the device has fewer than ``needed`` bytes free."""
    free: float = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if needed > free:
        raise Unavailable(f"would need {needed / 1e9:.1f} GB for {what}, {free / 1e9:.1f} GB are free")


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Operations per second of an n x n matmul, the fastest of five."""
    A = torch.randn(n, n, device=device).to(dtype)
    best = float("inf")
    for _ in range(6):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        A @ A
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def _free_memory() -> float:
    """Bytes available according to Linux; infinite on other systems."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return float("inf")
