"""What a run was measured on."""

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


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
    """Start measuring :func:`peak_memory` anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5")  # Linux: sets the high-water mark of resident memory to the present size
        except OSError:
            return  # some containers forbid it; the peak is then that of the process so far


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
