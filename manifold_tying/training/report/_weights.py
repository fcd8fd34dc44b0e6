"""Figures of single weights: spectra of every body, and how POET's rotations turned them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from manifold_tying import diagnostics
from manifold_tying.training.report._drawing import Drawn
from manifold_tying.training.report._experiment import Experiment, Run, arm_names
from manifold_tying.training.report._numbers import significant
from manifold_tying.training.report._palette import looks
from manifold_tying.training.report._panels import ArmLines, draw_panels, draw_ranges
from manifold_tying.training.report._series import TOKENS, Curve, curve, of_seeds
from manifold_tying.training.report._statistics import mean

SINGULAR_VALUES = {"max": "largest", "median": "median", "min": "smallest"}
STABLE, FINAL = ":", "-."  # linestyles of where POET's second and third phase begin


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlot:
    """One quantity of each weight against tokens."""

    name: str
    title: str
    label: str
    lines: Mapping[str, str]
    """Keys of a weight's flat numbers, and what they are called; the arms' last values of the first are told in words."""
    shaded: tuple[str, str] | None = None
    log: bool = False
    phases: bool = False
    """Mark POET's phases, found on the second line."""
    reading: str


def _turning(side: str, rows: str) -> WeightPlot:
    return WeightPlot(
        name=f"turning-{side}",
        title=f"How far {side} has turned",
        label=f"v⊤{side} v / v⊤v",
        lines={f"{side}.vector": f"{side} v", f"{side}.trace": f"tr {side} / m"},
        shaded=(f"{side}.low", f"{side}.high"),
        phases=True,
        reading=f"{side}, the product over all merges, turns the {rows} of W0. Heavy, with points: the cosine between a fixed "
        f"random v and {side} v, 1 at the identity. Thin, in its area: what it is for a random v, tr {side} / m ± 2 standard "
        "deviations. Upright, dotted: where stable learning begins; dash-dotted: where final adjusting does; both as "
        "diagnostics.phases finds them, and missing where it does not.",
    )


PLOTS = (
    WeightPlot(
        name="singular-values",
        title="Singular values",
        label="singular values of W: largest, median, smallest",
        lines={f"singular_values.{which}": name for which, name in SINGULAR_VALUES.items()},
        shaded=("singular_values.min", "singular_values.max"),
        log=True,
        reading="POET keeps those of W0, up to the error of its rotations; AdamW lets the large ones grow. Heavy: the largest; "
        "thin: the median and the smallest.",
    ),
    WeightPlot(
        name="svd-entropy",
        title="SVD entropy",
        label="SVD entropy of W",
        lines={"svd_entropy": ""},
        reading="How evenly the squared singular values are spread: 1 where all are equal, 0 for rank one.",
    ),
    WeightPlot(
        name="hyperspherical-energy",
        title="Hyperspherical energy",
        label="hyperspherical energy of the rows of W",
        lines={"hyperspherical_energy": ""},
        reading="Sum over all pairs of rows, normalized, of one over their distance: low where the neurons are spread evenly.",
    ),
    _turning("R", "outputs"),
    _turning("P", "inputs"),
)
UPDATES = "updates"


def weight_figures(experiment: Experiment) -> list[Drawn]:
    """Every figure of single weights for which there is data."""
    arms = arm_names(experiment.rows)
    weights = list(dict.fromkeys(name for run in experiment.runs for line in run.probes for name in line["weights"]))
    figures = []
    for plot in PLOTS:
        panels = {name: panel for name in weights if (panel := list(_panel(experiment, plot, arms, name)))}
        if panels:
            picture = draw_panels(plot.name, panels, looks(arms), plot.label, log=plot.log)
            seeds = of_seeds([line for panel in panels.values() for one in panel for line in one.lines.values()])
            figures.append(
                Drawn(
                    name=plot.name,
                    title=plot.title,
                    picture=picture,
                    against=TOKENS,
                    caption=f"{plot.reading} {seeds}",
                    alternative=_alternative(plot, panels),
                )
            )
    return figures + _updates(experiment, arms, weights)


def of_weight(run: Run, name: str) -> Run:
    """The run with the numbers of one weight as its metrics."""
    lines = [
        {"step": line["step"], "tokens": line["tokens"], **_bounds(line["weights"][name])}
        for line in run.probes
        if name in line["weights"]
    ]
    return replace(run, metrics=lines)


def _bounds(numbers: Mapping[str, float]) -> dict[str, float]:
    """With the ends of the area around the trace probe."""
    areas: dict[str, float] = {}
    for side in "RP":
        if f"{side}.trace" in numbers:
            middle, spread = numbers[f"{side}.trace"], 2 * numbers[f"{side}.trace_std"]
            areas |= {f"{side}.low": middle - spread, f"{side}.high": middle + spread}
    return {**numbers, **areas}


def _panel(experiment: Experiment, plot: WeightPlot, arms: Sequence[str], name: str) -> Iterator[ArmLines]:
    for arm in arms:
        of_arm = [run for run in experiment.runs if run.arm == arm]
        runs = [of_weight(run, name) for run in of_arm]
        found = {name: curve(runs, x=TOKENS, y=key, positive=plot.log) for key, name in plot.lines.items()}
        lines = {name: line for name, line in found.items() if line}
        if not lines:
            continue
        band = None
        if plot.shaded:
            low, high = (curve(runs, x=TOKENS, y=key, positive=plot.log) for key in plot.shaded)
            band = (low.x, low.mean, high.mean) if low and high else None
        marks = _phases(of_arm, list(lines.values())[1]) if plot.phases else {}
        yield ArmLines(arm=arm, lines=lines, band=band, marks=marks)


def _phases(runs: Sequence[Run], line: Curve) -> dict[str, float]:
    """Where the phases begin, in tokens; nothing where too little was recorded to tell."""
    rates = {metrics["tokens"]: metrics["lr"] for metrics in runs[0].metrics if metrics.get("lr") is not None}
    tokens = [int(x) for x in line.x]
    if len(tokens) < 4 or not rates:
        return {}
    first = rates[min(rates)]  # that of the first step stands for before it
    found = diagnostics.phases(tokens, line.mean.tolist(), [rates.get(x, first) for x in tokens])
    # A plateau from the beginning on is no phase that was entered: nothing has turned.
    entered = {STABLE: found.stable, FINAL: found.final}
    return {style: float(x) for style, x in entered.items() if x is not None and found.stable != tokens[0]}


def _alternative(plot: WeightPlot, panels: Mapping[str, Sequence[ArmLines]]) -> str:
    last: dict[str, list[float]] = {}
    for panel in panels.values():
        for one in panel:
            last.setdefault(one.arm, []).append(next(iter(one.lines.values())).last)
    values = ", ".join(f"{arm} {significant(mean(numbers), 4)}" for arm, numbers in last.items())
    return (
        f"{len(panels)} line charts, {plot.title}: a panel per weight ({', '.join(panels)}), lines per arm against training "
        f"tokens. Last values of {next(iter(plot.lines))}, mean over the weights: {values}."
    )


def _updates(experiment: Experiment, arms: Sequence[str], weights: Sequence[str]) -> list[Drawn]:
    ranges: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name in weights:
        for arm in arms:
            lasts = [of_weight(run, name).metrics[-1] for run in experiment.runs if run.arm == arm and run.probes]
            lasts = [last for last in lasts if "updates.mean" in last and last["step"]]
            if lasts:
                # At most two per step, one by R and one by P.
                low, middle, high = (
                    [last[f"updates.{which}"] / (2 * last["step"]) for last in lasts]
                    for which in ("min", "mean", "max")
                )
                ranges.setdefault(name, {})[arm] = (min(low), mean(middle), max(high))
    if not ranges:
        return []
    label = "share of the possible updates of an entry"
    of_arms = {arm: [of[arm] for of in ranges.values() if arm in of] for arm in arms}
    values = "; ".join(
        f"{arm} {significant(min(low for low, _, _ in of), 2)} to {significant(max(high for _, _, high in of), 2)}"
        for arm, of in of_arms.items()
        if of
    )
    return [
        Drawn(
            name=UPDATES,
            title="Updates of the entries",
            picture=draw_ranges(UPDATES, ranges, looks(arms), label),
            against="",
            caption="How evenly training reached the entries of each weight up to its end: R moves an entry with its row and P "
            "with its column, so each step can move it twice, which is 1 here. Scheme block always does, scheme full leaves "
            "dimensions out between merges. Points are means, whiskers reach from the entry with the fewest to that with "
            "the most.",
            alternative="Dot chart, Updates of the entries: share of the possible updates of each weight's entries "
            f"({', '.join(ranges)}), lowest to highest: {values}.",
        )
    ]
