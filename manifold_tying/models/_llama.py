"""The reference model: a Llama-like decoder around any token interface.

Attention is grouped-query, with an optional channel-wise gate and rotary positions in the rotate-half layout of Hugging Face's
Llama. Dims: B batch, N positions, d hidden size, F width of the mlp, V vocabulary, H query heads, D head dim.
"""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from manifold_tying import distributed
from manifold_tying.models._config import LlamaConfig
from manifold_tying.tying import LossOptions, TokenInterface

RotaryTables = tuple[Tensor, Tensor]


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> RotaryTables:
    """cos and sin, each (N, D/2), of the angles n θ^(-2i/D) for positions n and channel pairs i.

    Always float32: in bfloat16 neighbouring positions beyond 256 would share an angle. Recomputed in each forward, at N D
    operations versus N d² for one projection: no buffer to go stale on casts, moves or the meta device, and no maximum length.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of x (B, H, N, D) by the tables' angles, in float32 or wider."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention (B, N, d) -> (B, N, d): W_o (g ⊙ [head_1 ... head_H]), head_h = softmax(q_h Kᵀ / √D) V.

    The gate g (H·D) is applied between the heads and W_o (PIT, appendix A.1, "lightweight learnable channel-wise gate")
    and is initialized to one. The projections are separate Linears: one fused matmul measured between 5 % faster and 5 %
    slower on a CPU, and separate weights can be constrained and copied one by one.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, query_width, bias=False)
        self.key = nn.Linear(config.hidden_size, key_width, bias=False)
        self.value = nn.Linear(config.hidden_size, key_width, bias=False)
        self.output = nn.Linear(query_width, config.hidden_size, bias=False)
        self.gate = nn.Parameter(torch.ones(query_width)) if config.gated_attention else None

    def forward(self, x: Tensor, tables: RotaryTables) -> Tensor:
        query = rotate(self._heads(self.query(x)), tables)
        key = rotate(self._heads(self.key(x)), tables)
        value = self._heads(self.value(x))
        heads = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )
        concatenated = heads.transpose(1, 2).flatten(2)
        output: Tensor = self.output(concatenated if self.gate is None else concatenated * self.gate)
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, H·D) -> (B, H, N, D)."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


# Embeddings may be legitimately small (1/√V for an orthonormal memory, less once T has grown), so a norm's usual eps would
# matter. This one only keeps zero rows finite.
_EMBEDDING_NORM_EPS = 1e-12


class MLP(nn.Module):
    """SwiGLU (B, N, d) -> (B, N, d): W_down (silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Llama's block, y = x + attention(attention_norm(x)), then y + mlp(mlp_norm(y)); or PIT's, with parallel branches.

    PIT's block (appendix A.1) is x + attention(norm(x)) + mlp(norm(x)). The paper does not say whether its branches share
    the norm. Either way the totals of its Table 3 print alike (a norm is 2d of about 10 d² per block); other parallel
    blocks share it (GPT-J, PaLM).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = None if config.parallel_block else build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tables: RotaryTables) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, tables)
        x = x + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
        return x


class Llama(nn.Module):
    """A decoder-only language model; ``interface`` owns the embedding and the unembedding.

    FSDP2 runs its hooks around ``forward`` only: register ``hidden`` and ``loss`` with
    ``torch.distributed.fsdp.register_fsdp_forward_method`` before calling them.
    """

    def __init__(self, config: LlamaConfig, interface: TokenInterface) -> None:
        super().__init__()
        for name in ("vocab_size", "hidden_size"):
            if getattr(interface, name) != getattr(config, name):
                expected, found = getattr(config, name), getattr(interface, name)
                raise ValueError(f"expected an interface with the config's {name} {expected}, got {found}")
        self.config = config
        self.interface = interface
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights for everything but the interface; also initializes a meta-device model after ``to_empty``.

        Constrained weights are projected.

        Weights are N(0, std²). The two projections that write to the residual stream have std / √(2L), so that the
        stream's variance after 2L additions does not grow with the depth L (GPT-2).
        """
        std = self.config.initializer_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                scale = residual_std if name.endswith((".output", ".down")) else std
                if is_parametrized(module, "weight"):
                    weight = torch.randn(module.out_features, module.in_features) * scale
                    module.weight = weight.to(self.norm.weight.device)
                else:
                    distributed.sharded_normal_(module.weight).mul_(scale)
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, Attention) and module.gate is not None:
                nn.init.ones_(module.gate)
        self.norm.reset_parameters()

    def hidden(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to hidden states (B, N, d), after the final norm."""
        if ids.ndim != 2:
            raise ValueError(f"expected token ids (batch, positions), got {tuple(ids.shape)}; add a batch dimension")
        # In a bfloat16 body the interface may stay float32; the residual stream has the body's dtype.
        x: Tensor = self.interface.embed(ids).to(self.norm.weight.dtype)
        if self.config.embedding_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=_EMBEDDING_NORM_EPS)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        tables = rotary_tables(ids.shape[1], self.config.head_dim, self.config.rope_theta, ids.device)
        for block in self.blocks:
            x = block(x, tables)
        x = self.norm(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to next-token logits (B, N, V)."""
        return self.interface.logits(self.hidden(ids))

    def loss(self, ids: Tensor, targets: Tensor, **options: Unpack[LossOptions]) -> Tensor:
        """Cross-entropy in nats, by default the mean, of targets (B, N), the token after each of ids (B, N).

        Holds one chunk of the logits at a time. The options are those of :func:`manifold_tying.tying.linear_cross_entropy`.
        Nothing is shifted here: ``targets[:, n]`` belongs to the prediction made at position n.
        """
        if targets.shape != ids.shape:
            raise ValueError(f"targets must have the shape of ids, {tuple(ids.shape)}, got {tuple(targets.shape)}")
        return self.interface.loss(self.hidden(ids), targets, **options)


def build_norm(config: LlamaConfig) -> nn.RMSNorm | nn.LayerNorm:
    """The configured norm over the hidden size. In a bfloat16 model its statistics are computed in float32."""
    return (nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm)(config.hidden_size, eps=config.norm_eps)
