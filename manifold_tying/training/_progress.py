"""Progress bars with loss, tokens per second and defect."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from manifold_tying.training._loop import Observer


@contextmanager
def progress_bars(console: Console, steps: int) -> Iterator[Callable[[str, int, int], Observer]]:
    """Inside, call the yielded function with (run, its number, number of runs) for each run's observer."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as bars:

        def started(name: str, index: int, count: int) -> Observer:
            label = f"{name} ({index + 1}/{count})" if count > 1 else name
            task = bars.add_task(label, total=steps, numbers="")
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
    if metrics.get("defect") is not None:
        parts.append(f"defect {metrics['defect']:.0e}")
    return "  ".join(parts)
