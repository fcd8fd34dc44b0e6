"""The device of a run, the machine and its memory."""

import os
import platform
import re
import resource
import shlex
import sys
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
        raise ValueError(
            f"device {device!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, device and versions, for the report."""
    return {
        "processor": _processor(),
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
        try:
            _CLEAR.write_text("5")  # Linux: resets the high-water mark of resident memory
        except OSError:
            return  # some containers forbid it; the peak then includes everything before


def peak_memory(device: torch.device) -> int:
    """Bytes: largest memory allocated on a CUDA device, else largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def called_as(*subcommands: str) -> str | None:
    """This process's command line, quoted for a shell, if it is one of these subcommands."""
    return shlex.join(["manifold-tying", *sys.argv[1:]]) if sys.argv[1:] and sys.argv[1] in subcommands else None
