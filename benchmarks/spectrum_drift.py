"""Drift of the singular values in plain training without merges, by map and learning rate.

    python -m benchmarks.spectrum_drift

RiemannianAdam trains a 64 x 64 layer with blocks of 16 for 300 steps on a regression to random targets. The drift is the
largest change of a singular value, divided by the largest one; ‖A‖ is the largest spectral norm of a skew matrix. Both are the
worst of the seeds. "two terms, polished" appends one Newton-Schulz step G (3I - GᵀG) / 2, which squares the defect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from experiments.comparison import markdown_table
from manifold_tying import linalg
from manifold_tying.optim import RiemannianAdam

MAPS: dict[str, int | None] = {"exact": None, "two terms": 2, "four terms": 4, "two terms, polished": 2}


@dataclass(frozen=True)
class Options:
    """Settings of the experiment."""

    steps: int = 300
    seeds: int = 4
    lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


@contextmanager
def _polished(on: bool) -> Iterator[None]:
    series = linalg.cayley_neumann

    def polish(A: Tensor, *args: Any, **options: Any) -> Tensor:
        G = series(A, *args, **options)
        return G @ (1.5 * torch.eye(G.shape[-1]) - 0.5 * (G.mT @ G))

    linalg.cayley_neumann = polish if on else series
    try:
        yield
    finally:
        linalg.cayley_neumann = series


def drift(name: str, lr: float, seed: int, steps: int) -> tuple[float, float]:
    """Drift and ‖A‖ after training with one of MAPS."""
    torch.manual_seed(seed)
    layer: Any = mt.equivalence(nn.Linear(64, 64), block_size=16, terms=MAPS[name], seed=seed)
    x, target = torch.randn(2, 512, 64)
    before, optimizer = _singular_values(layer), RiemannianAdam(layer.parameters(), lr=lr)
    with _polished(name.endswith("polished")):
        for _ in range(steps):
            optimizer.zero_grad()
            (layer(x) - target).square().mean().backward()
            optimizer.step()
        after = _singular_values(layer)
    skews = linalg.skew(layer.parametrizations.weight.original.detach().view(-1, 120), 16)
    return float((after - before).abs().max() / before[0]), float(torch.linalg.matrix_norm(skews, 2).max())


def _singular_values(layer: nn.Linear) -> Tensor:
    return torch.linalg.svdvals(layer.weight.detach().double())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rows = []
    for lr in options.lrs:
        row = [f"{lr:g}"]
        for name in MAPS:
            found = [drift(name, lr, seed, options.steps) for seed in range(options.seeds)]
            row.append("{:.1e} ({:.2f})".format(*map(max, *found)))
        rows.append(row)
    print(markdown_table(["learning rate", *(f"{name} (‖A‖)" for name in MAPS)], rows, left=0))


if __name__ == "__main__":
    main()
