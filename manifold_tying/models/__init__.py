"""The reference language model, a Llama-like decoder around any token interface, and its presets."""

from manifold_tying.models._config import PRESETS, LlamaConfig, preset
from manifold_tying.models._llama import Llama

__all__ = ["PRESETS", "Llama", "LlamaConfig", "preset"]
