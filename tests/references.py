"""Small reference models, for what is measured of a model."""

from typing import Any

import manifold_tying as mt
from manifold_tying.models import Llama, LlamaConfig


def reference(interface: mt.TokenInterface, **options: Any) -> Llama:
    sizes: dict[str, Any] = {"vocab_size": interface.vocab_size, "hidden_size": interface.hidden_size}
    sizes |= {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16, "initializer_std": 0.3}
    return Llama(LlamaConfig(**{**sizes, **options}), interface)
