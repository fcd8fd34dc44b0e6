"""Rotary position embeddings in the rotate-half layout of Hugging Face's Llama.

Dims: B batch, N positions, H heads, D head dim.
"""

import torch
from torch import Tensor

RotaryTables = tuple[Tensor, Tensor]


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> RotaryTables:
    """cos and sin, each (N, D/2), of the angles n θ^(-2i/D) for positions n and channel pairs i.

    Always float32: in bfloat16 neighbouring positions beyond 256 would share an angle. Recomputed in each forward, at N D
    operations versus N d² for one projection: no buffer to go stale on casts, moves or the meta device, and no maximum length.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of x (B, H, N, D) by the tables' angles, in float32 or wider."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
