"""manifold-tying inspect: what a saved model's token interface is, and how well its two sides agree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from manifold_tying import diagnostics, linalg
from manifold_tying.diagnostics._bases import table_blocks
from manifold_tying.diagnostics._inspect import saved_interface
from manifold_tying.training.evaluate import health_warnings

WARNING = "warning"


@dataclass(frozen=True)
class InspectConfig:
    """Show size, tying, conditioning and consistency of a saved model's token interface, from its safetensors alone."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run, one of its checkpoints, or a transformers model, converted or not."""


def run_inspect(config: InspectConfig, console: Console) -> None:
    console.print(interface_summary(config.path))


def interface_summary(path: Path) -> Table:
    """The table that inspect prints."""
    numbers = interface_numbers(path)
    table = Table(title=Text(str(path)), show_header=False, caption_justify="left")
    for label, value, note in numbers:
        if label != WARNING:
            table.add_row(label, value, note)
    table.caption = Text("\n".join(f"Warning: {note}." for label, _, note in numbers if label == WARNING))
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
        condition = diagnostics.condition_from_factor(pit.cholesky_factor)
        numbers.append(("cond(T)", f"{condition:.3g}", ""))
        numbers.append(("defect", f"{diagnostics.defect(pit.memory.detach()).item():.1e}", "‖ZᵀZ - I‖ / √d"))
    consistency = diagnostics.interface_consistency(E, W_out)
    numbers += [(name, f"{value:.2g}", compared) for name, value, compared in consistency.rows()]
    if pit is not None:
        measured = {"cond_transform": condition, "delta_ti": consistency.delta_ti}
        numbers += [(WARNING, "", text) for text in health_warnings(measured, bridge=pit.bridge is not None).values()]
    return numbers


def _condition(table: Tensor) -> float:
    """Of a tall table, through its Gram matrix in float64, a block of rows at a time: up to 1e8."""
    d = table.shape[1]
    gram = torch.zeros(d, d, dtype=torch.float64)
    for rows in table_blocks(table):
        gram += linalg.gram(rows)
    squares = torch.linalg.eigvalsh(gram)
    return (squares[-1] / squares[0].clamp_min(0)).sqrt().item()
