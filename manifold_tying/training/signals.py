"""SIGTERM (from schedulers) and SIGINT (Ctrl-C) stop a run after saving the current step; a second Ctrl-C stops at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Termination:
    """The signal that has arrived, if any."""

    announced: bool = True  # print a line when it arrives; for rank 0
    arrived: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether the run should stop."""
        return self.arrived is not None

    @property
    def name(self) -> str:
        """Name of the signal; SIGTERM if another rank received it."""
        return (self.arrived or signal.SIGTERM).name

    @property
    def status(self) -> int:
        """Exit status, as a shell reports it for the signal; 0 would mean a finished run."""
        return 128 + (self.arrived or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.announced and not self.requested:
            text = f"\n{signal.Signals(number).name}: finishing the step, then saving. Ctrl-C again stops at once.\n"
            os.write(2, text.encode())  # print() is not reentrant
        self.arrived = signal.Signals(number)


@contextmanager
def termination(announced: bool = True) -> Iterator[Termination]:
    """Catch the signals while inside; outside Python's main thread this does nothing."""
    noted = Termination(announced)
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] is signal.SIG_IGN:  # as for a shell's background jobs
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, noted._note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
