"""Write checkpoint files atomically, and validate those of a converted model."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from manifold_tying.huggingface.folder import read_shapes
from manifold_tying.huggingface.install import half_names, halves
from manifold_tying.huggingface.modules import PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

README = "README.md"
NOTES = (README, "README-manifold-tying.md")
"""File names of the note in a converted checkpoint; the second is used if the folder has its own README."""
NOTE = """\
---
library_name: manifold-tying
---
# A language model with Pseudo-Inverse Tying

This checkpoint was written by manifold-tying. In place of the embedding table and the head it has one tensor for both: a free
table, or a memory Z with a transform T. transformers alone cannot read it: it finds no table under the stock name. Do not
pass `ignore_mismatched_sizes=True`. The model would then have random tables.

Load it where manifold-tying is installed:

    import manifold_tying as mt
    model = mt.load("path/to/this/folder")

Or write a stock checkpoint, with two dense tables, that any program reads:

    manifold-tying export path/to/this/folder path/to/stock
"""
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
        weights = sorted(draft.glob("model*.safetensors"))
        if not weights:
            raise ValueError(
                f"expected {type(model).__name__}.save_pretrained to write model.safetensors, but it wrote "
                f"{', '.join(sorted(file.name for file in draft.iterdir())) or 'nothing'}; {path} is unchanged"
            )
        converted = isinstance(model.get_input_embeddings(), PITEmbedding)
        if converted:
            check_files(model, list(map(str, weights)))
            (draft / note_name(path)).write_text(NOTE, encoding="utf-8")
        written = {file.name for file in draft.iterdir()}
        for name in written:
            os.replace(draft / name, path / name)
        for pattern in _WEIGHTS:
            for file in path.glob(pattern):
                if file.name not in written:
                    file.unlink()
        if not converted:
            for name in filter(lambda name: is_note(path / name), NOTES):
                (path / name).unlink()
    finally:
        shutil.rmtree(draft)
        if new and not any(path.iterdir()):
            path.rmdir()


def is_note(file: Path) -> bool:
    """Whether the file is the note from :func:`write`, not the user's README."""
    return file.is_file() and file.read_bytes() == NOTE.encode()


def note_name(folder: Path) -> str:
    """File name for the note that does not overwrite a user's README."""
    return README if not os.path.lexists(folder / README) or is_note(folder / README) else NOTES[1]


def check_files(model: "PreTrainedModel", files: Sequence[str]) -> None:
    """ValueError unless the files hold the model's interface and no other table.

    transformers renames modules of some models when it saves and loads them: model.language_model to language_model.model,
    model.embed_tokens to tok_embeddings. So the embedding is identified by its interface, not by its name.
    """
    if not files:
        return
    if len({os.path.dirname(file) for file in files}) > 1:
        raise ValueError(f"expected all shards in one folder, but the index names {', '.join(files)}; fix the index")
    found = {name: shape for name, shape in read_shapes(files).items() if not name.endswith(".form")}  # in both halves
    inside, outside = half_names(model)
    expected = {f"{inside}.{name}": list(tensor.shape) for name, tensor in halves(model)[0].named_parameters()}
    stored = _below(inside, _renamed(inside, outside, found)) | _below(outside, found)
    if stored != expected:
        raise ValueError(
            f"the parts of this checkpoint disagree: according to config.json it has {_listed(expected)}, but the files hold "
            f"{_listed(stored)}. Save the converted model again with manifold_tying.save"
        )


def _renamed(inside: str, outside: str, found: Mapping[str, list[int]]) -> Mapping[str, list[int]]:
    """Shapes under the model's name for the embedding, if exactly one other module has an interface."""
    holders = {name.partition(".interface.")[0] for name in found if ".interface." in name} - {inside, outside}
    if len(holders) != 1:
        return found
    stored = holders.pop() + "."
    return {f"{inside}.{name.removeprefix(stored)}" if name.startswith(stored) else name: found[name] for name in found}


def _below(half: str, found: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Stored shapes of the table or interface of the module ``half``, under the model's names."""
    known = any(name.startswith(f"{half}.") for name in found)
    own = f".{half if known else half.rpartition('.')[2]}."
    parts = {f".{name}".rpartition(own)[1:]: shape for name, shape in found.items()}
    return {
        f"{half}.{rest}": shape
        for (match, rest), shape in parts.items()
        if match and (rest == "weight" or rest.startswith("interface."))
    }


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items())) or "none"
