"""Adapters of PEFT's OFT as adapters of :class:`PoetConfig`."""

import math
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from peft import OFTConfig, PeftConfig, load_peft_weights
from safetensors.torch import save_file
from torch import Tensor

from manifold_tying.peft.layer import REFERENCE
from manifold_tying.peft.model import PoetConfig


def convert_oft(path: str | PathLike[str], out: str | PathLike[str]) -> None:
    """Write an adapter of PEFT's OFT on linear layers, saved in ``path``, as a POET adapter of the same function.

    OFT multiplies row vectors by (I - Q)(I + Q)⁻¹, which is our P = (I - A)⁻¹(I + A) with A = Q. Its series of k terms is
    transposed, I + 2Q + ... + 2Qᵏ⁻² + Qᵏ⁻¹ with A = -Q, and has k - 2 terms in our count.

    Args:
        path: folder with adapter_config.json and the weights.
        out: folder to write to, created if missing.

    Raises:
        ValueError: another method than OFT; coft, trained biases or fewer than 3 terms, which POET has not; blocks of
            different sizes; embeddings. The files do not tell a convolution, whose patches OFT rotates, not its channels.
    """
    config: Any = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, OFTConfig):
        raise ValueError(f"expected an adapter of PEFT's OFT in {path}, got one of {config.peft_type}")
    terms = max(2, config.num_cayley_neumann_terms - 2) if config.use_cayley_neumann else None
    if config.coft or config.bias != "none" or (terms and config.num_cayley_neumann_terms < 3):
        raise ValueError(
            f"expected OFT with coft=False, bias='none' and at least 3 terms, got coft={config.coft}, bias={config.bias!r} and "
            f"{config.num_cayley_neumann_terms} terms in {path}; PoetConfig has no such adapters. Merge it into the model"
        )
    tensors: dict[str, Tensor] = load_peft_weights(str(path), device="cpu")
    skews = {name: tensor for name, tensor in tensors.items() if name.endswith(".oft_R.weight")}
    sizes = {(1 + math.isqrt(1 + 8 * tensor.shape[-1])) // 2 for tensor in skews.values()}
    if len(sizes) != 1 or any(".oft_embedding_R." in name for name in tensors):
        raise ValueError(
            f"expected linear layers and blocks of one size in {path}, got {sorted(sizes) or 'no'} sizes for "
            f"{', '.join(tensors)}; PoetConfig has one block_size and rotates no embeddings"
        )
    size = sizes.pop()
    sign = -1 if config.use_cayley_neumann else 1
    found = {name: tensor for name, tensor in tensors.items() if name not in skews}  # of modules_to_save
    for name, skew in skews.items():
        found[name.replace(".oft_R.weight", ".poet_skew")] = (sign * size / REFERENCE) * skew.float().flatten()
    names = {field.name for field in fields(PoetConfig)} & {field.name for field in fields(OFTConfig)} - {"peft_type"}
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    Path(out).mkdir(parents=True, exist_ok=True)
    save_file(found, Path(out) / "adapter_model.safetensors", {"format": "pt"})
    PoetConfig(**options, block_size=size, sides="in", map="series" if terms else "exact", terms=terms).save_pretrained(
        str(out)
    )
