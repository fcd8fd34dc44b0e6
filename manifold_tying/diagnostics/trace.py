"""Logit lens and transition trace: how a token's meaning changes from layer to layer (PIT, section 3, figure 2)."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from manifold_tying._extra import needs_extra
from manifold_tying.diagnostics.bases import Anchors, nearest_anchors, vector_angles
from manifold_tying.diagnostics.interface import embedding_and_head, interface_tables
from manifold_tying.huggingface.tables import undisturbed
from manifold_tying.tying import TokenInterface

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Stream(NamedTuple):
    """The residual stream at one position: the first block's input f_0 and all block outputs f_1, ..., f_m."""

    states: Tensor  # (m + 1, d), before the final norm
    read: Callable[[Tensor], Tensor]  # final norm, (..., d) to (..., d)
    score: Callable[[Tensor], Tensor]  # normed states (..., d) to logits (..., V)


@torch.no_grad()
def residual_stream(model: nn.Module, ids: Tensor, position: int = -1) -> Stream:
    """The states at one position of token ids (N,), collected by temporary hooks.

    Takes the reference model, or a Hugging Face causal language model whose final norm outputs its last hidden state. Raises
    ValueError if reading out the last state does not give the model's own prediction.
    """
    if ids.ndim != 1 or not -len(ids) <= position < len(ids):
        raise ValueError(f"expected token ids (N,) and a position among them, got {tuple(ids.shape)} and {position}")
    with undisturbed(model):
        ours = isinstance(getattr(model, "interface", None), TokenInterface)
        stream, logits = (_reference if ours else _hugging_face)(model, ids[None], position)
    expected = logits[0, position].float()
    found = stream.score(stream.read(stream.states[-1:]))[0].float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
        raise ValueError(
            f"the lens does not support {type(model).__name__}: its final norm and head applied to the last state do not give "
            f"its prediction (off by {(found - expected).abs().max():.1e}), so the model computes more"
        )
    return stream


def _reference(model: Any, ids: Tensor, position: int) -> tuple[Stream, Tensor]:
    states: list[Tensor] = []
    with ExitStack() as hooks:
        first = model.blocks[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0, position]))
        hooks.callback(first.remove)
        for block in model.blocks:
            hooks.callback(block.register_forward_hook(lambda _, __, out: states.append(out[0, position])).remove)
        logits = model(ids)
    return Stream(torch.stack(states), model.norm, model.interface.logits), logits


def _hugging_face(model: Any, ids: Tensor, position: int) -> tuple[Stream, Tensor]:
    _, head = embedding_and_head(model)
    calls: list[tuple[nn.Module, Any, Any]] = []  # of every module, in order
    with ExitStack() as hooks:
        for module in model.modules():
            hook = module.register_forward_hook(lambda module, inputs, out: calls.append((module, inputs, out)))
            hooks.callback(hook.remove)
        output = model(ids, output_hidden_states=True, use_cache=False)
    last = output.hidden_states[-1]
    # Compare storage, because some models reshape the norm's output. ``calls`` keeps outputs alive, so no address is reused.
    made = [
        (module, inputs[0])
        for module, inputs, out in calls
        if inputs and isinstance(out, Tensor) and out.data_ptr() == last.data_ptr() and out.numel() == last.numel()
    ]
    if not made:
        raise ValueError(f"found no final norm in {type(model).__name__}: no module outputs hidden_states[-1]")
    norm, before = made[0]  # the innermost module comes first
    states = [state[0, position] for state in output.hidden_states[:-1]] + [before[0, position]]
    return Stream(torch.stack(states), norm, lambda state: _scaled(model.config, head(state))), output.logits


def _scaled(config: Any, logits: Tensor) -> Tensor:
    """The steps that some models add after the head: Granite divides, Cohere multiplies, Gemma caps."""
    text = config.get_text_config()
    logits = logits / getattr(text, "logits_scaling", 1) * (getattr(text, "logit_scale", None) or 1)
    cap = getattr(text, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Smoothness:
    """How smooth a trace is, in four numbers, best at 0. The paper says "smooth" and "erratic" without defining a measure."""

    label_changes: float
    """Share of steps between layers that change the lens's top token: "appears to change its nearest meaning"."""
    distribution_step: float
    """Mean total variation distance between the lens's distributions of successive layers, in [0, 1]."""
    turn: float
    """Mean angle in radians between successive states after the final norm: the path "in raw hidden-state space"."""
    side_disagreement: float
    """Share of layers whose nearest input-side and output-side anchors are different tokens."""


@dataclass(frozen=True, slots=True)
class TransitionTrace:
    """The medium token, layer by layer, f_0 (the embedding) to f_m: (m + 1, ...) each.

    Holds the top tokens of the logit lens, and the anchors of both sides nearest to each state.
    """

    states: Tensor
    """(m + 1, d): f_l after the final norm, the head's input. The last one gives the prediction."""
    top: Tensor
    """(m + 1, k) token ids, int64, by descending logit f_l W_out."""
    probabilities: Tensor
    """(m + 1, k), float32."""
    input_anchors: Anchors
    """Rows of E nearest to f_l before the final norm."""
    output_anchors: Anchors
    """Columns of W_out nearest to f_l after the final norm."""
    smoothness: Smoothness

    def rows(self, decode: Decode = str) -> list[tuple[str, ...]]:
        """(layer, top tokens with probabilities, nearest input anchor, nearest output anchor) for each layer, as text."""
        sides = (self.input_anchors, self.output_anchors)
        rows = []
        for layer, (tokens, shares) in enumerate(zip(self.top.tolist(), self.probabilities.tolist(), strict=True)):
            lens = " ".join(f"{decode(token)} {share:.3f}" for token, share in zip(tokens, shares, strict=True))
            nearest = (f"{decode(int(side.ids[layer, 0]))} {side.cosines[layer, 0]:.3f}" for side in sides)
            rows.append((str(layer), lens, *nearest))
        return rows


@torch.no_grad()
def transition_trace(model: nn.Module, ids: Tensor, *, position: int = -1, top: int = 5) -> TransitionTrace:
    """The transition trace at one position of ids (N,): from that token to the prediction of the next one.

    Takes the reference model or a Hugging Face causal language model. Each state goes through the final norm and the model's
    own head, so the last layer gives the model's prediction (checked on each call).
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


def draw_traces(traces: Mapping[str, TransitionTrace], decode: Decode = str) -> "Figure":
    """Draw one panel per trace, with a column per layer and three bands; save it with ``.savefig(path)``.

    The bands show the nearest row of E, the nearest column of W_out, and the logit lens's top token. A fainter cell has a
    smaller cosine or probability. A token has one colour in all panels (twenty colours, then they repeat), so a smooth
    transition shows few long stretches and an erratic one many colours.
    """
    with needs_extra("train", "drawing a trace needs"):
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    if not traces:
        raise ValueError("expected at least one trace to draw, got none")
    bands = {name: _bands(trace) for name, trace in traces.items()}
    tokens = list(dict.fromkeys(v for panel in bands.values() for ids, _ in panel.values() for v in ids))
    palette = colormaps["tab20"]
    colours = {v: palette(i % palette.N) for i, v in enumerate(tokens)}
    layers = max(len(trace.top) for trace in traces.values())
    figure = Figure(figsize=(1.6 + 0.85 * layers, 0.6 + 1.5 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, panel) in zip(figure.subplots(len(traces), 1, squeeze=False)[:, 0], bands.items(), strict=True):
        for row, (ids, strengths) in enumerate(panel.values()):
            for layer, (token, strength) in enumerate(zip(ids, strengths, strict=True)):
                style: dict[str, Any] = {"facecolor": colours[token], "edgecolor": "#d8dee4", "linewidth": 0.5}
                axes.add_patch(Rectangle((layer - 0.5, row - 0.5), 1, 1, alpha=0.15 + 0.85 * strength, **style))
                # At most ten letters fit a cell. An unescaped dollar sign would start a formula.
                text = decode(token).strip()[:10].replace("$", r"\$") or repr(decode(token))[1:-1]
                axes.text(layer, row, text, ha="center", va="center", fontsize=7, clip_on=True)
        axes.set(xlim=(-0.5, layer + 0.5), ylim=(len(panel) - 0.5, -0.5))
        axes.set_xticks(range(layer + 1), [str(i) for i in range(layer + 1)], fontsize=8)
        axes.set_yticks(range(len(panel)), list(panel), fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        smooth = traces[name].smoothness
        numbers = f"label changes {smooth.label_changes:.2f}, sides differ {smooth.side_disagreement:.2f}"
        axes.set_title(f"{name}: {numbers}", fontsize=9)
    axes.set_xlabel("layer (0 is the embedding)", fontsize=9)
    return figure


def _bands(trace: TransitionTrace) -> dict[str, tuple[list[int], list[float]]]:
    """For each band, the token of each layer and its cosine or probability in [0, 1]."""
    sides = {"input side": trace.input_anchors, "output side": trace.output_anchors}
    bands = {name: (side.ids[:, 0].tolist(), side.cosines[:, 0].clamp(0, 1).tolist()) for name, side in sides.items()}
    return bands | {"logit lens": (trace.top[:, 0].tolist(), trace.probabilities[:, 0].tolist())}
