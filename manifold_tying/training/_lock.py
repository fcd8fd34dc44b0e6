"""One process writes to a folder at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manifold_tying.training._files import writing_to

try:
    import fcntl
except ModuleNotFoundError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


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
