"""Atomic writes, fsync, digests and locks."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from manifold_tying._json import check_regular, read_object


class Damaged(ValueError):
    """A file has changed since it was written."""


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Create the folder; an OSError inside becomes a ValueError with advice."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose a folder that is writable") from error


def check_writable(folder: Path) -> None:
    """Raises ValueError if the folder can be neither written to nor created; changes nothing."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "read-only for you" if nearest.is_dir() else "not a folder"
        raise ValueError(f"cannot write to {folder}: {nearest} is {why}; choose a folder that is writable")


def write_atomic(path: Path, data: bytes) -> Path:
    """Write to a draft named by the process id, then rename it over the path."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_own(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """The JSON object of a file that is about to be written, {} if it is missing or damaged.

    Raises ValueError if it lacks these keys, so that it is somebody else's.
    """
    try:
        found = read_object(path, "")
    except ValueError:
        return {}
    if not set(keys) <= found.keys():
        raise ValueError(f"{path} is not a file that manifold-tying wrote; choose another --out")
    return found


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file while inside; raises filelock.Timeout after ``timeout`` seconds (-1 waits forever).

    The system releases the lock when the process ends; the file remains. On a filesystem without locks this does nothing.
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
    """Create the folder and lock it while inside; raises a ValueError with the process that holds it."""
    path = folder / ".lock"
    with writing_to(folder):
        path.touch()
    try:
        with exclusive(path, timeout=0):
            path.write_text(f"{os.getpid()}\n")
            yield
    except Timeout:
        holder = path.read_text().strip() or "unknown"
        raise ValueError(
            f"{folder} is in use: the process {holder} writes to it. Wait for it, stop it, or choose another --out"
        ) from None
