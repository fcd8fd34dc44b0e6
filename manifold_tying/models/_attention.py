"""Grouped-query attention with rotary positions and an optional channel-wise gate.

Dims: B batch, N positions, d hidden size, H query heads, K key/value heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying.models._config import LlamaConfig
from manifold_tying.models._rope import RotaryTables, rotate


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
        if self.gate is not None:
            concatenated = concatenated * self.gate
        return self.output(concatenated)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, H·D) -> (B, H, N, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
