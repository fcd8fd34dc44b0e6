"""SIGTERM, by which schedulers announce that a machine is taken away: the step in flight is finished and saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = (
    128 + signal.SIGTERM
)  # what a shell reports of a process ended by SIGTERM; 0 would say that the run is finished


class Termination:
    """Whether SIGTERM has arrived."""

    requested = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def termination() -> Iterator[Termination]:
    """Inside, SIGTERM is noted and does nothing else. In a thread other than the main one Python cannot listen."""
    noted = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGTERM, noted._note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)
