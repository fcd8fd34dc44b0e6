"""The signals that ask a run to stop: SIGTERM, by which schedulers take a machine away, and SIGINT, which is Ctrl-C.

The step in flight is finished and saved. A second Ctrl-C interrupts at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Termination:
    """Which signal has arrived, if any."""

    arrived: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """Whether the run is to stop."""
        return self.arrived is not None

    @property
    def name(self) -> str:
        """Of the signal; SIGTERM where it reached another process of the run."""
        return (self.arrived or signal.SIGTERM).name

    @property
    def status(self) -> int:
        """What a shell reports of a process that the signal ended; 0 would say that the run is finished."""
        return 128 + (self.arrived or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.arrived = signal.Signals(number)


@contextmanager
def termination() -> Iterator[Termination]:
    """Inside, the signals are noted and do nothing else. In a thread other than the main one Python cannot listen."""
    noted = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] is signal.SIG_IGN:  # a shell starts jobs in the background so
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, noted._note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
