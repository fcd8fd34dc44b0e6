"""manifold-tying inspect: what a saved model's token interface is, and how well its two sides agree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from manifold_tying import diagnostics, linalg
from manifold_tying.diagnostics._bases import table_blocks
from manifold_tying.diagnostics._inspect import saved_interface


@dataclass(frozen=True)
class InspectConfig:
    """Show size, tying, conditioning and consistency of a saved model's token interface, from its safetensors alone."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run, one of its checkpoints, or a transformers model, converted or not."""


def run_inspect(config: InspectConfig, console: Console) -> None:
    console.print(interface_summary(config.path))


def interface_summary(path: Path) -> Table:
    """The table that inspect prints."""
    table = Table(title=str(path), show_header=False)
    for label, value, note in interface_numbers(path):
        table.add_row(label, value, note)
    return table


def interface_numbers(path: Path) -> list[tuple[str, str, str]]:
    """(label, value, what it is of) of a saved model's token interface."""
    (E, W_out, description), pit = saved_interface(path)
    V, d = E.shape
    numbers = [
        ("token interface", description, ""),
        ("V x d", f"{V:,} x {d:,}", str(E.dtype).removeprefix("torch.")),
        ("cond(E)", f"{_condition(E):.3g}", "largest over smallest singular value"),
    ]
    if pit is not None:
        numbers.append(("cond(T)", f"{diagnostics.condition(pit.transform):.3g}", ""))
        numbers.append(("defect", f"{diagnostics.defect(pit.memory.detach()).item():.1e}", "‖ZᵀZ - I‖ / √d"))
    consistency = diagnostics.interface_consistency(E, W_out)
    return numbers + [(name, f"{value:.2g}", compared) for name, value, compared in consistency.rows()]


def _condition(table: Tensor) -> float:
    """Of a tall table, through its Gram matrix in float64, a block of rows at a time: up to 1e8."""
    d = table.shape[1]
    gram = torch.zeros(d, d, dtype=torch.float64)
    for rows in table_blocks(table):
        gram += linalg.gram(rows)
    squares = torch.linalg.eigvalsh(gram)
    return (squares[-1] / squares[0].clamp_min(0)).sqrt().item()
