"""What a token means at each layer on the way to the next one: logit lens and transition trace (PIT, section 3, figure 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manifold_tying.diagnostics._anchors import Anchors, nearest_anchors
from manifold_tying.diagnostics._bases import vector_angles
from manifold_tying.diagnostics._stream import residual_stream
from manifold_tying.diagnostics._tables import interface_tables

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Smoothness:
    """How smooth a trace is. The paper says smooth and erratic without a number; these four are ours, each 0 at best."""

    label_changes: float
    """Share of steps between layers at which the lens's top token changes: "appears to change its nearest meaning"."""
    distribution_step: float
    """Mean total variation distance between the lens's distributions of successive layers, in [0, 1]."""
    turn: float
    """Mean angle between successive states as the head reads them, radians: the path "in raw hidden-state space"."""
    side_disagreement: float
    """Share of layers at which the nearest anchor of the input side is another token than that of the output side."""


@dataclass(frozen=True, slots=True)
class TransitionTrace:
    """The medium token, layer by layer, f_0 (the embedding) to f_m: (m + 1, ...) each.

    By the logit lens, top tokens and their probabilities, and as a point of hidden space, the nearest tokens of both sides.
    """

    states: Tensor
    """(m + 1, d): f_l through the final norm, as the head reads it. The last one is the prediction's."""
    top: Tensor
    """(m + 1, k) token ids, int64: largest logits f_l W_out first."""
    probabilities: Tensor
    """(m + 1, k), float32."""
    input_anchors: Anchors
    """Rows of E nearest to f_l before the final norm."""
    output_anchors: Anchors
    """Columns of W_out nearest to f_l after it."""
    smoothness: Smoothness

    def rows(self, decode: Decode = str) -> list[tuple[str, ...]]:
        """(layer, top tokens with probabilities, nearest input anchor, nearest output anchor) per layer, as text."""
        sides = (self.input_anchors, self.output_anchors)
        rows = []
        for layer, (tokens, shares) in enumerate(zip(self.top.tolist(), self.probabilities.tolist(), strict=True)):
            lens = " ".join(f"{decode(token)} {share:.3f}" for token, share in zip(tokens, shares, strict=True))
            nearest = (f"{decode(int(side.ids[layer, 0]))} {side.cosines[layer, 0]:.3f}" for side in sides)
            rows.append((str(layer), lens, *nearest))
        return rows


@torch.no_grad()
def transition_trace(model: nn.Module, ids: Tensor, *, position: int = -1, top: int = 5) -> TransitionTrace:
    """The transition trace of the token at one position of ids (N,), by default the last: the medium of the next one.

    The model is the reference model or a Hugging Face causal language model. Each state goes through the final norm and
    the model's own head, so the last layer's line is the model's prediction (checked on each call).
    """
    stream = residual_stream(model, ids, position)
    E, W_out = interface_tables(model)
    if not 1 <= top <= len(E):
        raise ValueError(f"expected top in [1, {len(E)}], got {top}")
    states = stream.read(stream.states)
    distributions = stream.score(states).float().softmax(-1)
    probabilities, tokens = distributions.topk(top)
    inputs, outputs = nearest_anchors(stream.states, E, top), nearest_anchors(states, W_out.mT, top)
    smoothness = Smoothness(
        label_changes=_mean(tokens[1:, 0] != tokens[:-1, 0]),
        distribution_step=_mean((distributions[1:] - distributions[:-1]).abs().sum(-1) / 2),
        turn=_mean(vector_angles(states[1:], states[:-1])),
        side_disagreement=_mean(inputs.ids[:, 0] != outputs.ids[:, 0]),
    )
    return TransitionTrace(states, tokens, probabilities, inputs, outputs, smoothness)


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
