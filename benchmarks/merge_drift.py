"""Drift of singular values over a hundred merges, by the number of terms of the Neumann series.

    python -m benchmarks.merge_drift --out benchmarks/results/merge-drift.json --figure docs/figures/merge-drift.svg

A float32 nn.Linear is merged a hundred times. Before each merge every block gets a new skew matrix with normal entries, scaled
to a spectral norm of 0.1. The drift is the largest change of a singular value since the start, divided by the largest singular
value. The series' defect bounds the drift of one merge: ‖A‖^(2k + 2) for even k, 2‖A‖^(k + 1) for odd k.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from benchmarks._command import commit
from benchmarks._figure import pyplot, save
from experiments.comparison import markdown_table
from manifold_tying.linalg import skew
from manifold_tying.training.machine import machine

TERMS: tuple[int | None, ...] = (1, 2, 3, 4, 5, 6, None)
MERGES = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Options:
    """Settings of the experiment."""

    size: int = 512
    """Rows and columns of the weight."""
    block_size: int = 256
    norm: float = 0.1
    """‖A‖ of every block before each merge."""
    seed: int = 0
    out: Path | None = None
    """JSON file to write."""
    figure: Path | None = None
    """SVG file to draw."""


def drifts(options: Options, terms: int | None) -> dict[int, float]:
    """Drift by number of merges."""
    generator = torch.Generator().manual_seed(options.seed)
    layer: Any = nn.Linear(options.size, options.size, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * options.size**-0.5)
    mt.equivalence(layer, block_size=options.block_size, terms=terms, seed=options.seed)
    start = torch.linalg.svdvals(layer.weight.detach().double())
    found = {}
    for count in range(1, max(MERGES) + 1):
        with torch.no_grad():
            layer.parametrizations.weight.original.copy_(_draw(options, generator))
        with warnings.catch_warnings():
            # The drift with one term is part of the experiment.
            warnings.filterwarnings("ignore", "weight: the skew matrices have grown")
            mt.merge(layer)
        if count in MERGES:
            now = torch.linalg.svdvals(layer.weight.detach().double())
            found[count] = float(f"{float((now - start).abs().max() / start[0]):.3g}")
    return found


def _draw(options: Options, generator: torch.Generator) -> Tensor:
    b = options.block_size
    vectors = torch.randn(2 * options.size // b, b * (b - 1) // 2, generator=generator)
    return (vectors * (options.norm / torch.linalg.matrix_norm(skew(vectors, b), 2)[:, None])).flatten()


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the curves on logarithmic axes."""
    plt = pyplot("merge drift")
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for i, (name, values) in enumerate(curves.items()):
        even = name == "exact" or int(name) % 2 == 0
        label = "exact Cayley map" if name == "exact" else f"k = {name}"
        axes.loglog(list(values), list(values.values()), "o-" if even else "s--", color=f"C{i}", label=label)
    axes.set_xlabel("merges")
    axes.set_ylabel("largest change of a singular value / σ₁")
    axes.grid(alpha=0.3)
    axes.legend(ncol=2, fontsize="small")
    save(plt, figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    curves = {"exact" if terms is None else str(terms): drifts(options, terms) for terms in TERMS}
    head = ["merges", *("exact" if terms is None else f"k = {terms}" for terms in TERMS)]
    body = [[str(count), *(f"{curve[count]:.1e}" for curve in curves.values())] for count in MERGES]
    print(markdown_table(head, body, left=0))
    if options.out is not None:
        settings = {"size": options.size, "block_size": options.block_size, "norm": options.norm, "seed": options.seed}
        result = {"settings": settings, "machine": machine(torch.device("cpu")), "commit": commit(), "drift": curves}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.figure is not None:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
