"""The sizes of a checkpoint that a run goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifold_tying.tying.huggingface._folder import read_transformers_config, recorded_options, weight_map


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
    interface = recorded_options(folder)
    weight_map(folder)
    config = read_transformers_config(folder).get_text_config()
    if not all(isinstance(getattr(config, name, None), int) for name in ("vocab_size", "hidden_size")):
        raise ValueError(f"expected the vocab_size and hidden_size of a language model in {folder / 'config.json'}")
    return Shape(config.vocab_size, config.hidden_size, getattr(config, "max_position_embeddings", None), interface)
