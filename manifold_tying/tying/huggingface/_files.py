"""The files of a checkpoint: written whole or not at all, and what those of a converted model have to hold."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from manifold_tying._json import check_regular
from manifold_tying.tying.huggingface._install import halves
from manifold_tying.tying.huggingface._modules import PITEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def write(model: "PreTrainedModel", path: Path) -> None:
    """``save_pretrained`` beside the files that are there, then moved over them, and shards of an earlier save dropped.

    Beside is a hidden folder inside ``path``, which may be a mount point or a link: a file moves only within a file system.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder to write to, but {path} is a file")
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=path))
    try:
        model.save_pretrained(beside)
        weights = sorted(beside.glob("model*.safetensors"))
        if not weights:
            raise ValueError(
                f"expected {type(model).__name__}.save_pretrained to write model.safetensors, but it wrote "
                f"{', '.join(sorted(file.name for file in beside.iterdir())) or 'nothing'}; {path} is as it was"
            )
        if isinstance(model.get_input_embeddings(), PITEmbedding):
            check_files(model, list(map(str, weights)))
        written = {file.name for file in beside.iterdir()}
        for name in written:
            os.replace(beside / name, path / name)
        for pattern in _WEIGHTS:
            for file in path.glob(pattern):
                if file.name not in written:
                    file.unlink()
    finally:
        shutil.rmtree(beside)
        if new and not any(path.iterdir()):
            path.rmdir()


def check_files(model: "PreTrainedModel", files: Sequence[str]) -> None:
    """ValueError unless the files hold the interface that the model has, and no table beside it.

    Some models rename what is above an embedding when they are written and read (multimodal ones: model.language_model to
    language_model.model); names are compared from the embedding's own on there.
    """
    if not files:
        return
    found = read_shapes(files)
    embedding, head = halves(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside, outside = names[id(embedding)], names[id(head)]
    expected = {f"{inside}.{name}": list(tensor.shape) for name, tensor in embedding.named_parameters()}
    of_interface = _below(inside, found) | _below(outside, found)
    if of_interface != expected:
        raise ValueError(
            f"the parts of this checkpoint disagree: by its config.json it has {_listed(expected)}, in its files are "
            f"{_listed(of_interface)}. Save the converted model again, with manifold_tying.save"
        )


def read_shapes(files: Sequence[str]) -> dict[str, list[int]]:
    """Shapes of all tensors in safetensors files, by name; ValueError that names the file which is none, or not whole."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, list[int]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"expected a converted checkpoint in safetensors, got {file}")
        check_regular(file)
        try:
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
        except SafetensorError as error:
            raise ValueError(f"cannot read {file}: {error}; it is damaged, or not all of it was copied") from error
    return found


def _below(half: str, found: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Shapes of the table or interface that a file has for the embedding or head called ``half``, under the model's names."""
    known = any(name.startswith(f"{half}.") for name in found)
    own = f".{half if known else half.rpartition('.')[2]}."
    parts = {f".{name}".rpartition(own)[1:]: shape for name, shape in found.items()}
    return {
        f"{half}.{rest}": shape
        for (match, rest), shape in parts.items()
        if match and (rest == "weight" or rest.startswith("interface."))
    }


def _listed(shapes: Mapping[str, Sequence[int] | Tensor]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items())) or "none"
