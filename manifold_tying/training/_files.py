"""Files that a reader never sees half written."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> Path:
    """Write beside the path, then rename over it. The process id keeps two writers out of each other's draft."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
