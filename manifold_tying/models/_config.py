"""Sizes and switches of the reference model, and its presets: the two papers' architectures and two small ones for CPUs."""

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


def _pit(d: int, layers: int, heads: int, kv_heads: int, intermediate: int, head_dim: int = 64) -> LlamaConfig:
    """A row of PIT's Table 3: parallel block, gated GQA, SwiGLU, and LayerNorm, because it counts "scale and shift"."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        norm="layernorm",
        parallel_block=True,
        gated_attention=True,
    )


def _poet(d: int, layers: int, heads: int, intermediate: int) -> LlamaConfig:
    """A column of POET's Table 8: a plain Llama without GQA; eps as in the GaLore configurations POET builds on."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        intermediate_size=intermediate,
        norm_eps=1e-6,
    )


def _small(vocab: int, d: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaConfig:
    """PIT's architecture at CPU size, with RMSNorm; the mlp is 8/3 d wide, rounded up to a multiple of 64."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=d,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate,
        parallel_block=True,
        gated_attention=True,
    )


PRESETS: dict[str, LlamaConfig] = {
    "bytes": _small(257, 64, 4, 4, 1, 192),  # every byte and the separator: hardly more tokens than channels
    "nano": _small(4096, 128, 4, 4, 1, 384),
    "mini": _small(8192, 256, 6, 8, 2, 704),
    "pit-0.3b": _pit(1024, 24, 16, 4, 2816),
    "pit-0.6b": _pit(1280, 32, 20, 5, 3584),
    # Table 3 contradicts itself here. 24 heads of width 64 make 1536, not d = 1600, and 1.157 B parameters instead of the
    # printed 1.17 B. That total (1.168 B) follows from the appendix's d_kv = d/4 = 400: 25 query heads and 6.25 key/value
    # heads, which cannot be built; 25 and 5 make 1.157 B again. We keep the printed total, the head counts 24 and 6 and the
    # mlp width (no multiple of 256), and use width 68: the even number above 1600 / 24 = 66.7 makes 1.173 B (66 makes
    # 1.16499 B, which prints as 1.16).
    "pit-1.2b": _pit(1600, 40, 24, 6, 4480, head_dim=68),
    # The widths of Table 8, multiples of the block size 256: the POET-BS rows of Table 2.
    "poet-60m": _poet(512, 8, 8, 1280),
    "poet-130m": _poet(768, 12, 12, 2048),
    "poet-350m": _poet(1024, 24, 16, 2816),
    "poet-1.3b": _poet(2048, 24, 32, 5376),
    # The widths before that rounding: the AdamW, GaLore and POET-FS rows of Table 2. (GaLore's own 1B configuration has
    # 5461; Table 2's counts of POET-FS need a multiple of 8, 5464.)
    "galore-60m": _poet(512, 8, 8, 1376),
    "galore-130m": _poet(768, 12, 12, 2048),
    "galore-350m": _poet(1024, 24, 16, 2736),
    "galore-1.3b": _poet(2048, 24, 32, 5464),
}


def preset(name: str) -> LlamaConfig:
    """The configuration called ``name``; change it with ``dataclasses.replace``, its width together with ``head_dim=0``."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
