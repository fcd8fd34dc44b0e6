"""The signals that ask a run to stop: SIGTERM, by which schedulers take a machine away, and SIGINT, which is Ctrl-C.

The step in flight is finished and saved. A second Ctrl-C interrupts at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Termination:
    """Which signal has arrived, if any.

    Args:
        announced: print a line when one arrives; only one process of a run should.
    """

    def __init__(self, announced: bool = True) -> None:
        self.arrived: signal.Signals | None = None
        self._announced = announced

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
        if self._announced and not self.requested:
            text = f"\n{signal.Signals(number).name}: finishing the step, then saving. Ctrl-C again stops at once.\n"
            os.write(2, text.encode())  # print() may not be reentered, and a signal may arrive within one
        self.arrived = signal.Signals(number)


@contextmanager
def termination(announced: bool = True) -> Iterator[Termination]:
    """Inside, the signals are noted and announced. In a thread other than the main one Python cannot listen."""
    noted = Termination(announced)
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
