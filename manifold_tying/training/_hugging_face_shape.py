"""The sizes of a checkpoint that a run goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifold_tying.tying.huggingface._checkpoint import recorded_options
from manifold_tying.tying.huggingface._files import read_shapes
from manifold_tying.tying.huggingface._register import import_transformers


@dataclass(frozen=True)
class Shape:
    """What a run needs to know of a checkpoint before its weights are read.

    Attributes:
        vocab_size: V.
        hidden_size: d.
        max_positions: the longest sequence; None where the model has no limit.
        interface: what a converted checkpoint records of its interface; None of a stock one.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int | None
    interface: Mapping[str, Any] | None


def read_shape(folder: Path) -> Shape:
    """From config.json; ValueError where the folder is no transformers checkpoint with safetensors."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected the folder of a transformers checkpoint, but there is no {folder / 'config.json'}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"expected weights as safetensors, but there are none in {folder}; save the model again")
    read_shapes(sorted(map(str, folder.glob("*.safetensors"))))  # names the file that is damaged
    transformers = import_transformers()
    try:
        interface = recorded_options(folder)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'} describes no model that transformers knows: {error}") from error
    return Shape(config.vocab_size, config.hidden_size, getattr(config, "max_position_embeddings", None), interface)
