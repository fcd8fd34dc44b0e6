"""What the tables of malformed inputs share: a command run in this process, and what it left of a folder."""

import hashlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manifold_tying.cli import main

PATIENCE = 60  # seconds; what is refused takes milliseconds


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and everything that was printed; any exception but SystemExit, and a hang, fails the test."""
    capsys.readouterr()
    status = 0
    try:
        with in_time():
            main(arguments)
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    said = capsys.readouterr()
    return status, " ".join((said.out + said.err).split())


@contextmanager
def in_time() -> Iterator[None]:
    """Fail where what is inside hangs."""

    def hang(*args: object) -> None:
        raise AssertionError(f"no answer after {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tree(folder: Path) -> dict[str, str]:
    """Every file below the folder with a hash of it; other kinds by their kind. A lock that a process left says nothing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file() and path.name != ".lock":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir() or (path.exists() and path.name != ".lock"):
            found[name] = "folder" if path.is_dir() else "special"
    return found
