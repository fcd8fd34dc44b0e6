"""The device of a run, the machine and its memory."""

import os
import platform
import re
import resource
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def check_device(device: str) -> torch.device:
    """Parse the device; raises ValueError if it is unknown or missing."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"unknown device {device!r}; use cpu, cuda or cuda:N")
    try:
        found = torch.device(device)
    except RuntimeError as error:  # the device number overflows
        raise ValueError(f"unknown device {device!r}: {error}") from error
    if found.type == "cuda" and (not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"device {device!r} does not exist: torch sees {torch.cuda.device_count()} CUDA ones; use cpu")
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, device and versions, for the report."""
    return {
        "processor": _entry(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def reset_peak_memory(device: torch.device) -> None:
    """Reset :func:`peak_memory`, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.init()  # before this, the device has no index
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        with suppress(OSError):  # some containers forbid it; the peak then includes everything before
            _CLEAR.write_text("5")  # Linux: resets the high-water mark of resident memory


def peak_memory(device: torch.device) -> int:
    """Bytes: largest memory allocated on a CUDA device, else largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if found := _entry(_STATUS, "VmHWM"):
        return int(found.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _entry(path: Path, name: str) -> str:
    """The first value of this name in a file of Linux; empty if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def called_as(*subcommands: str) -> str | None:
    """This process's command line, quoted for a shell, if it is one of these subcommands."""
    return shlex.join(["manifold-tying", *sys.argv[1:]]) if sys.argv[1:] and sys.argv[1] in subcommands else None
