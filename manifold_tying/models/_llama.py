"""The reference model: a Llama-like decoder around any token interface.

Dims: B batch, N positions, d hidden size, F width of the mlp, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from manifold_tying import distributed
from manifold_tying.models._attention import Attention
from manifold_tying.models._config import LlamaConfig
from manifold_tying.models._rope import RotaryTables, rotary_tables
from manifold_tying.tying import TokenInterface

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
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SequentialBlock(nn.Module):
    """Llama's block: y = x + attention(norm₁(x)), then y + mlp(norm₂(y))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tables: RotaryTables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.mlp(self.mlp_norm(x))


class ParallelBlock(nn.Module):
    """PIT's block (appendix A.1): x + attention(norm(x)) + mlp(norm(x)), one norm for both branches.

    The paper does not say whether the branches share their norm. Either way the totals of its Table 3 print alike (a norm is
    2d of about 10 d² per block); other parallel blocks share it (GPT-J, PaLM).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tables: RotaryTables) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, tables) + self.mlp(normed)


class Llama(nn.Module):
    """A decoder-only language model; ``interface`` owns the embedding and the unembedding.

    FSDP2 runs its hooks around ``forward`` only: register ``hidden`` and ``loss`` with
    ``torch.distributed.fsdp.register_fsdp_forward_method`` before calling them.
    """

    def __init__(self, config: LlamaConfig, interface: TokenInterface) -> None:
        super().__init__()
        for name in ("vocab_size", "hidden_size"):
            if getattr(interface, name) != getattr(config, name):
                raise ValueError(
                    f"the interface must have the {name} of the config, {getattr(config, name)}, "
                    f"got {getattr(interface, name)}; build it with the numbers of the config"
                )
        self.config = config
        self.interface = interface
        block = ParallelBlock if config.parallel_block else SequentialBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights for everything but the interface; also initializes the meta device's weights after to_empty.

        Weights are N(0, std²). The two projections that write to the residual stream have std / √(2L), so that the
        stream's variance after 2L additions does not grow with the depth L (GPT-2).
        """
        if any(is_parametrized(module) for module in self.blocks.modules()):
            raise RuntimeError(
                "reset_parameters cannot draw a constrained weight; reset first, then add the constraints"
            )
        std = self.config.initializer_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                distributed.sharded_normal_(module.weight).mul_(
                    residual_std if name.endswith((".output", ".down")) else std
                )
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, Attention) and module.gate is not None:
                nn.init.ones_(module.gate)
        self.norm.reset_parameters()

    def hidden(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to hidden states (B, N, d), after the final norm."""
        if ids.ndim != 2:
            raise ValueError(
                f"expected token ids of shape (batch, positions), got {tuple(ids.shape)}; add a batch dimension"
            )
        # In a bfloat16 body the interface may stay float32; the residual stream has the body's dtype.
        x = self.interface.embed(ids).to(self.norm.weight.dtype)
        if self.config.embedding_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=_EMBEDDING_NORM_EPS)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        tables = rotary_tables(ids.shape[1], self.config.head_dim, self.config.rope_theta, ids.device)
        for block in self.blocks:
            x = block(x, tables)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to next-token logits (B, N, V)."""
        return self.interface.logits(self.hidden(ids))

    def loss(self, ids: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy in nats of targets (B, N), the token after each of ids (B, N); never holds all logits.

        Nothing is shifted here: ``targets[:, n]`` belongs to the prediction made at position n.
        """
        if targets.shape != ids.shape:
            raise ValueError(f"targets must have the shape of ids, {tuple(ids.shape)}, got {tuple(targets.shape)}")
        return self.interface.loss(self.hidden(ids), targets, ignore_index=ignore_index)


def build_norm(config: LlamaConfig) -> nn.RMSNorm | nn.LayerNorm:
    """The configured norm over the hidden size. In a bfloat16 model its statistics are computed in float32."""
    kind = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}[config.norm]
    return kind(config.hidden_size, eps=config.norm_eps)
