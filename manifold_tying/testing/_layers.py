"""Strategies of constrained layers and token interfaces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from manifold_tying.linalg import polar
from manifold_tying.parametrizations import orthogonal, stiefel
from manifold_tying.testing._strategies import SEEDS
from manifold_tying.tying import PIT, TokenInterface, TransposeTying, Untied


class Stack(nn.Module):
    """A weight with a batch dimension: three 5 x 4 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mT


# (factory of a layer, parameter to constrain, number of stacked matrices)
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, int | None]] = {
    "tall": (lambda: nn.Linear(3, 5), "weight", None),
    "wide": (lambda: nn.Linear(5, 3), "weight", None),
    "square": (lambda: nn.Linear(4, 4), "weight", None),
    "bfloat16": (lambda: nn.Linear(3, 5, dtype=torch.bfloat16), "weight", None),
    "embedding": (lambda: nn.Embedding(7, 3), "weight", None),
    "convolution": (lambda: nn.Conv2d(2, 4, 3), "weight", None),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", 3),
    "recurrent": (lambda: nn.LSTM(3, 4), "weight_hh_l0", 4),
    "batched": (Stack, "weight", None),
}
CONSTRAINTS: dict[str, Callable[..., Any]] = {
    "stiefel": stiefel,
    **{f"orthogonal {kind}": partial(orthogonal, map=kind) for kind in ("polar", "qr", "cayley", "cayley-neumann")},
}


@st.composite
def constrained_layers(draw: Any) -> nn.Module:
    """A small layer with one orthonormal weight, constrained by ``stiefel`` or by a map of ``orthogonal``.

    Linear (tall, wide, square, bfloat16), Embedding, Conv2d, MultiheadAttention's in_proj_weight, an LSTM's recurrent weight,
    or a stack of matrices, with random weights.
    """
    make, name, blocks = LAYERS[draw(st.sampled_from(list(LAYERS)))]
    put_on = CONSTRAINTS[draw(st.sampled_from(list(CONSTRAINTS)))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(SEEDS))
        return put_on(make(), name, blocks=blocks)


@st.composite
def token_interfaces(draw: Any, *, vocab_size: int = 11, hidden_size: int = 4) -> TokenInterface:
    """An Untied, a TransposeTying or a PIT with any memory, from scratch or from a table."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(SEEDS))
        kind = draw(st.sampled_from(["untied", "transpose", "pit", "pit from a table"]))
        if kind == "untied":
            return Untied(vocab_size, hidden_size)
        if kind == "transpose":
            return TransposeTying(vocab_size, hidden_size)
        memory = draw(st.sampled_from(["free", "frozen", "trainable"]))
        if kind == "pit":
            return PIT(vocab_size, hidden_size, memory=memory)
        U, H = polar(torch.randn(vocab_size, hidden_size))
        table = U @ (H + 0.5 * torch.eye(hidden_size))  # well-conditioned enough for float32
        return PIT.from_embedding(
            table, memory=memory, transform=draw(st.sampled_from(["identity", "head", "embedding"]))
        )
