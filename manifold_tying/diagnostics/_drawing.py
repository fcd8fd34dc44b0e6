"""Transition traces as a picture (PIT, figure 2). Needs matplotlib, which is imported when something is drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from manifold_tying.diagnostics._trace import Decode, TransitionTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAINT = "#d8dee4"
_LETTERS = 10  # of a token, in a cell


def draw_traces(traces: Mapping[str, TransitionTrace], decode: Decode = str) -> "Figure":
    """One panel per trace: a column per layer, the band's colour is the token that the state is nearest to.

    Three bands: nearest row of E, nearest column of W_out, and the logit lens's top token; the fainter a cell, the smaller
    the cosine or the probability. One colour per token in all panels (twenty, then they repeat), so that a smooth
    transition is a band of few long stretches and an erratic one is many-coloured. Save it with ``.savefig(path)``.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing a trace needs matplotlib; install the extra: pip install 'manifold-tying[train]' "
            "(from a checkout: pip install '.[train]')"
        ) from error
    if not traces:
        raise ValueError("expected at least one trace to draw, got none")
    bands = {name: _bands(trace) for name, trace in traces.items()}
    tokens = list(dict.fromkeys(v for panel in bands.values() for ids, _ in panel.values() for v in ids))
    palette = colormaps["tab20"]
    colours = {v: palette(i % palette.N) for i, v in enumerate(tokens)}  # more tokens than colours share them
    layers = max(len(trace.top) for trace in traces.values())
    figure = Figure(figsize=(1.6 + 0.85 * layers, 0.6 + 1.5 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, panel) in zip(figure.subplots(len(traces), 1, squeeze=False)[:, 0], bands.items(), strict=True):
        _panel(axes, panel, colours, decode)
        smooth = traces[name].smoothness
        numbers = f"label changes {smooth.label_changes:.2f}, sides differ {smooth.side_disagreement:.2f}"
        axes.set_title(f"{name}: {numbers}", fontsize=9)
    axes.set_xlabel("layer (0 is the embedding)", fontsize=9)
    return figure


def _bands(trace: TransitionTrace) -> dict[str, tuple[list[int], list[float]]]:
    """Per band the token of each layer and how strongly it holds, in [0, 1]."""
    sides = {"input side": trace.input_anchors, "output side": trace.output_anchors}
    bands = {name: (side.ids[:, 0].tolist(), side.cosines[:, 0].clamp(0, 1).tolist()) for name, side in sides.items()}
    return bands | {"logit lens": (trace.top[:, 0].tolist(), trace.probabilities[:, 0].tolist())}


def _panel(
    axes: "Axes",
    bands: Mapping[str, tuple[list[int], list[float]]],
    colours: Mapping[int, tuple[float, float, float, float]],
    decode: Decode,
) -> None:
    from matplotlib.patches import Rectangle

    for row, (tokens, strengths) in enumerate(bands.values()):
        for layer, (token, strength) in enumerate(zip(tokens, strengths, strict=True)):
            cell = Rectangle((layer - 0.5, row - 0.5), 1, 1, edgecolor=_FAINT, linewidth=0.5)
            cell.set_facecolor(colours[token])
            cell.set_alpha(0.15 + 0.85 * strength)
            axes.add_patch(cell)
            # a dollar sign would start a formula
            text = decode(token).strip()[:_LETTERS].replace("$", r"\$") or repr(decode(token))[1:-1]
            axes.text(layer, row, text, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set(xlim=(-0.5, layer + 0.5), ylim=(len(bands) - 0.5, -0.5))
    axes.set_xticks(range(layer + 1), [str(i) for i in range(layer + 1)], fontsize=8)
    axes.set_yticks(range(len(bands)), list(bands), fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
