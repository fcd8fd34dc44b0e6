"""File locks: one process writes to a folder at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from manifold_tying.training._files import writing_to

LOCK = ".lock"


@contextmanager
def exclusive(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file while inside. filelock.Timeout if another process holds it for ``timeout`` seconds; -1 waits.

    The system releases the lock when the process ends; the file remains. Without filesystem locks this does nothing.
    """
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        raise
    except OSError:  # a filesystem without locks
        pass
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and lock it while inside; a ValueError names the process that holds it."""
    path = folder / LOCK
    with writing_to(folder):
        path.touch()
    try:
        with exclusive(path, timeout=0):
            path.write_text(f"{os.getpid()}\n")
            yield
    except Timeout:
        holder = path.read_text().strip() or "unknown"
        raise ValueError(
            f"{folder} is in use: the process {holder} writes to it. Wait for it or end it, or choose another --out"
        ) from None
