"""One process writes to a folder at a time."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manifold_tying.training._files import writing_to

try:
    import fcntl
except ModuleNotFoundError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
QUIET = 3600  # seconds without a change after which a folder that nobody holds is abandoned


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold it while inside; ValueError that names the process which has it.

    The system frees it when the process ends, however it ends, so the file that stays says nothing by itself. Where the
    filesystem knows no locks everybody is let in.
    """
    if fcntl is None:  # pragma: no cover - Windows
        yield
        return
    with writing_to(folder):
        file = (folder / LOCK).open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"{folder} is in use: the process {holder} writes to it. Wait for it or end it, or choose another --out"
            ) from None
        except OSError:  # a filesystem without locks
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder by itself, without a file in it; :func:`abandoned` sees that."""
    descriptor = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if descriptor is not None:
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def abandoned(folder: Path) -> bool:
    """Whether no process holds the folder and nothing in it has changed for an hour.

    Both, since some filesystems know no locks, or none of another machine's.
    """
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        if time.time() - newest < QUIET:
            return False
        if fcntl is None:  # pragma: no cover - Windows
            return True
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
