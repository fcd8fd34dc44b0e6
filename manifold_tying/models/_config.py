"""Sizes and switches of the reference model."""

from dataclasses import dataclass
from typing import Literal, get_args

from manifold_tying import precision

NormName = Literal["rmsnorm", "layernorm"]

_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Architecture of a :class:`Llama`, except its token interface.

    Round-trips through ``dataclasses.asdict`` and JSON. The defaults of the switches give a plain Llama: sequential blocks,
    no gate, RMSNorm.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Grouped-query attention: ``num_heads / num_kv_heads`` query heads share one key/value head."""
    intermediate_size: int
    """Width of the SwiGLU branch."""
    head_dim: int = 0
    """Width of a head. 0 is replaced by ``hidden_size // num_heads``; an explicit value may make the heads together wider or
    narrower than the hidden size. ``dataclasses.replace`` keeps the computed value: pass ``head_dim=0`` when sizes change."""
    rope_theta: float = 10_000.0
    norm: NormName = "rmsnorm"
    norm_eps: float = 1e-5
    parallel_block: bool = False
    """Both branches read the same norm and are added at once, as in PIT's models, instead of sequentially."""
    gated_attention: bool = False
    """One learnable factor per channel of the concatenated heads, before the output projection."""
    embedding_norm: bool = False
    """RMS-normalize the looked-up embeddings, without a gain, before the first block. Otherwise T⁻¹ of a PIT interface sets
    the scale of the residual stream, and the embeddings vanish in it as T grows to sharpen the logits."""
    embedding_scale: float = 1.0
    """Multiplies the looked-up embeddings, after their norm if there is one; √d in Gemma."""
    initializer_std: float = 0.02

    def __post_init__(self) -> None:
        for name in _SIZES:
            precision.check_int(name, getattr(self, name), 1)
        precision.check_int("head_dim", self.head_dim, 0, " (0: derived)")
        for name in ("rope_theta", "norm_eps", "initializer_std", "embedding_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.norm not in get_args(NormName):
            raise ValueError(f"unknown norm {self.norm!r}; choose one of {', '.join(get_args(NormName))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}; each key/value head serves the same number of query heads"
            )
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"num_heads must divide hidden_size, got hidden_size={self.hidden_size}, "
                    f"num_heads={self.num_heads}; or give head_dim explicitly"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even, got {self.head_dim}: rotary embeddings turn pairs of channels; "
                "change num_heads or give an even head_dim"
            )
