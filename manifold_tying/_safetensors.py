"""Read safetensors files of a folder that may be damaged; nothing is unpickled."""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifold_tying._extra import needs_extra
from manifold_tying._json import check_regular, read_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGED = "it is damaged or incomplete"


def weight_map(folder: Path) -> dict[str, str]:
    """Map each tensor name to its file; ValueError if an index points outside the folder."""
    if (folder / WHOLE).exists():
        with _open(folder / WHOLE) as tensors:
            return dict.fromkeys(tensors.keys(), WHOLE)
    if not (folder / INDEX).exists():
        raise ValueError(
            f"expected weights as safetensors, but {folder} has neither {WHOLE} nor {INDEX}. Load pickled weights (.bin) "
            "with transformers, if you trust them, and save the model again with safe_serialization=True"
        )
    where: dict[str, str] = read_object(folder / INDEX, DAMAGED).get("weight_map", {})
    files = where.values() if isinstance(where, dict) else ()
    if not files or not all(isinstance(file, str) and re.fullmatch(r"[^/\\]*\.safetensors", file) for file in files):
        raise ValueError(f"{folder / INDEX} is damaged: expected a weight_map to safetensors files of this folder")
    return where


def check_readable(files: Iterable[Path]) -> None:
    """ValueError unless each safetensors file can be opened."""
    for file in files:
        with _open(file):
            pass


def whole_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a folder's safetensors files, which may hold shards of it."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    check_readable(sorted(folder.glob("*.safetensors")))  # its error names the damaged file
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (found.size, found.properties.dtype) for name, found in metadata.items()}


def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's part of each tensor of :func:`whole_shapes` into it. Not collective."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


def _open(file: Path) -> Any:
    with needs_extra("train", "reading a saved model needs"):
        from safetensors import SafetensorError, safe_open
    try:
        check_regular(file)
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}): it is missing, damaged or incomplete") from error
