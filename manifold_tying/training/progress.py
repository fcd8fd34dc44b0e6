"""Progress bars with loss, tokens per second and the consistency of a PIT interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from manifold_tying.training.loop import Observer

Started = Callable[..., Observer]
"""Called before a run with its name, index, number of runs and perhaps steps; returns its observer."""


@contextmanager
def progress_bars(console: Console, default_steps: int) -> Iterator[Started]:
    """Yields a function that adds a run's bar and returns its observer; ``default_steps`` is for runs without their own."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=8),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[numbers]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:

        def started(name: str, index: int, count: int, steps: int | None = None) -> Observer:
            label = f"{name} ({index + 1}/{count})" if count > 1 else name
            task = bars.add_task(label, total=steps or default_steps, numbers="")
            shown: dict[str, Any] = {}

            def observe(metrics: dict[str, Any]) -> None:
                shown.update(metrics)
                bars.update(task, completed=metrics["step"], numbers=_numbers(shown))

            return observe

        yield started


def _numbers(metrics: dict[str, Any]) -> str:
    parts = [f"loss {metrics['loss']:.3f}"]
    if metrics.get("val_loss") is not None:
        parts.append(f"val {metrics['val_loss']:.3f}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    if metrics.get("defect") is not None:  # PIT; the defect stays small even after W_out E = I is lost
        parts.append(f"ΔTI {metrics['delta_ti']:.0e}")
    return "  ".join(parts)
