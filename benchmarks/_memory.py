"""Peak memory of one step, on a CPU in a process of its own."""

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
    """Bytes that a step of the contender holds at most beyond what is there before it, measured at its second step.

    With ``Row.whole_memory`` beyond what is there before the contender is built.

    ``benchmarks.NAME.rows(options)`` is asked again in the fresh process, which builds that one contender alone: what
    others left behind in an allocator would otherwise hide what it takes. On CUDA, whose allocator counts what is asked of it,
    here. The second step, because the first one makes an optimizer's state and the libraries' workspaces, which stay.
    """
    if options.device == "cuda":
        return _measure(benchmark, options, row, contender)
    # A server that has imported everything and computed nothing: each process forked from it is as good as new, without
    # the seconds that importing takes. (Every optimizer imports torch._dynamo when it is built.)
    context: BaseContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "benchmarks._command"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_measure, benchmark, options, row, contender).result()
        except BrokenProcessPool as error:
            raise Unavailable("its process was killed, most likely for want of memory") from error


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
    """Bytes in use now, from which on the peak is looked for."""
    _give_back(device)
    reset_peak_memory(device)
    return peak_memory(device)


def _give_back(device: torch.device) -> None:
    """Return freed memory, so that taking it again is seen."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks of up to 32 MB
    if trim is not None:
        trim(0)
