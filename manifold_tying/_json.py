"""Read JSON files that may be damaged; every failure becomes one kind of error."""

import json
import os
import stat
from pathlib import Path
from typing import Any


class NotJSON(ValueError):
    """A text is not JSON."""


def parsed(text: str | bytes) -> Any:
    """Parse a JSON text; raises NotJSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also: not UTF-8, or an integer of thousands of digits
        raise NotJSON(str(error)) from None


def check_regular(path: str | os.PathLike[str]) -> None:
    """OSError unless the path is a regular file: opening a FIFO would block until something writes to it."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "FIFO, socket or device"
        raise OSError(f"expected the regular file {os.fspath(path)}, found a {kind}")


def read_bytes(path: Path) -> bytes:
    """Read a regular file; OSError for anything else."""
    check_regular(path)
    return path.read_bytes()


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Read a JSON object; otherwise raises ValueError that names the file and ends with the advice."""
    try:
        content = parsed(read_bytes(path).decode())
    except (OSError, ValueError) as error:
        reason = f"is not JSON ({error})" if isinstance(error, ValueError) else f"cannot be read ({error})"
        raise ValueError(f"{path} {reason}; {advice}") from error
    if not isinstance(content, dict):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path}: expected a JSON object, got {kind}; {advice}")
    return content
