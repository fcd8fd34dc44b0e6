"""One process writes to a folder at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from manifold_tying.training._files import writing_to

LOCK = ".lock"


@contextmanager
def exclusive(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file while inside; filelock.Timeout where another process has it for that many seconds, -1 to wait.

    The system frees it when the process ends, however it ends, so the file that stays says nothing by itself. Where the
    filesystem knows no locks everybody is let in.
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
    """Make the folder and hold it while inside; ValueError that names the process which has it."""
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
