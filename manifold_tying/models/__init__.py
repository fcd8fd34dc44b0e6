"""The reference language model: one Llama-like decoder that takes its token interface from outside, and its presets."""

from manifold_tying.models._config import LlamaConfig
from manifold_tying.models._llama import Llama
from manifold_tying.models._presets import PRESETS, preset

__all__ = ["PRESETS", "Llama", "LlamaConfig", "preset"]
