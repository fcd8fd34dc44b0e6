"""What a machine may lack."""

import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch


def lacking(reason: str) -> NoReturn:
    """Skip the test for want of a program; where CI is set, fail, so that it is not skipped unseen."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes held at once during ``run`` beyond those before, from the allocator's own events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
