"""Write the files of a checkpoint all at once."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def write(model: "PreTrainedModel", path: Path) -> None:
    """``save_pretrained`` to a temporary folder, then replace the old files and remove stale shards.

    The temporary folder is hidden inside ``path``, because files move only within a file system and ``path`` may be a mount.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder to write to, but {path} is a file")
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=path))
    try:
        model.save_pretrained(draft)
        written = {file.name for file in draft.iterdir()}
        if not any(draft.glob("model*.safetensors")):
            raise ValueError(
                f"expected {type(model).__name__}.save_pretrained to write model.safetensors, but it wrote "
                f"{', '.join(sorted(written)) or 'nothing'}; {path} is unchanged"
            )
        for name in written:
            os.replace(draft / name, path / name)
        for pattern in _WEIGHTS:
            for file in path.glob(pattern):
                if file.name not in written:
                    file.unlink()
    finally:
        shutil.rmtree(draft)
        if new and not any(path.iterdir()):
            path.rmdir()
