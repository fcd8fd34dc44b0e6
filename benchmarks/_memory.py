"""Peak memory of one step; on a CPU, measured in a separate process."""

import ctypes
import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any

import torch

from benchmarks._harness import Unavailable
from manifold_tying.training.machine import peak_memory, reset_peak_memory


def peak_of_step(benchmark: str, options: Any, row: str, contender: str) -> int:
    """Peak memory of the contender's second step above the memory in use before it, in bytes.

    With ``Row.whole_memory``, above the memory in use before the contender is built.

    On a CPU, a fresh process calls ``benchmarks.NAME.rows(options)`` and builds only this contender, because memory that other
    contenders left in the allocator would hide the peak. CUDA's allocator counts allocations, so there it runs in this process.
    The first step does not count, because it allocates the optimizer's state and libraries' workspaces, which stay.
    """
    if options.device == "cuda":
        return _measure(benchmark, options, row, contender)
    # Fork from a server that has imported everything and computed nothing, which saves seconds of imports in each process.
    # (Every optimizer imports torch._dynamo when it is built.)
    context: BaseContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "benchmarks._command"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measure, benchmark, options, row, contender).result()
        except BrokenProcessPool as error:
            raise Unavailable("its process was killed, probably because it ran out of memory") from error


def _measure(benchmark: str, options: Any, row: str, contender: str) -> int:
    rows = importlib.import_module(f"benchmarks.{benchmark}").rows(options)
    of_row = next(r for r in rows if r.label == row)
    (found,) = (c for c in of_row.contenders if c.name == contender)
    device = torch.device(options.device)
    before = _level(device)
    step = found.build()
    for _ in range(found.steps):
        step()
    if not of_row.whole_memory:
        before = _level(device)
    for _ in range(found.steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return peak_memory(device) - before


def _level(device: torch.device) -> int:
    """Reset the peak and return the bytes in use."""
    _give_back(device)
    reset_peak_memory(device)
    return peak_memory(device)


def _give_back(device: torch.device) -> None:
    """Return freed memory to the system, so that reusing it counts."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks of up to 32 MB
    if trim is not None:
        trim(0)
