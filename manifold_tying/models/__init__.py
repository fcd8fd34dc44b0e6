"""The reference language model: one Llama-like decoder that takes its token interface from outside, and its presets."""

from manifold_tying.models._config import PRESETS, LlamaConfig, preset
from manifold_tying.models._llama import Llama

__all__ = ["PRESETS", "Llama", "LlamaConfig", "preset"]
