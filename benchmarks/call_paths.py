"""How much of the package's own code the central operations pass through.

    python -m benchmarks.call_paths

Counts functions, files and calls, and the deepest nesting. Comprehensions and calls into other packages are not counted.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.tying import Memory

PACKAGE = str(Path(mt.__file__).parent)


class Counts(NamedTuple):
    """What one call passed through."""

    functions: int
    files: int
    depth: int
    calls: int


def count(run: Callable[[], object]) -> Counts:
    """Call ``run`` and count."""
    functions: set[tuple[str, str]] = set()
    depths: list[int] = []

    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<")

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_ours(frame):
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))
            outer: FrameType | None = frame
            depths.append(0)
            while outer is not None:
                depths[-1] += is_ours(outer)
                outer = outer.f_back

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Counts(len(functions), len({file for file, _ in functions}), max(depths, default=0), len(depths))


def _token_loss(interface: mt.TokenInterface, ids: Tensor) -> Tensor:
    return interface.loss(interface.embed(ids), ids)


def measure() -> dict[str, Counts]:
    """The counts by operation, after one call of each that creates states and caches."""
    layer = mt.stiefel(nn.Linear(128, 2048))
    optimizer = RiemannianAdam(param_groups(layer), lr=1e-3)
    poet = mt.equivalence(nn.Linear(512, 512), block_size=64)
    ids = torch.randint(1000, (8, 32))

    def train() -> None:
        layer(torch.randn(4, 128)).square().sum().backward()

    train()
    optimizer.step()
    train()
    found = {"RiemannianAdam step": count(optimizer.step)}

    def add(name: str, forward: Callable[[], Tensor]) -> None:
        forward().backward()
        losses: list[Tensor] = []
        found[f"{name}, forward"] = count(lambda: losses.append(forward()))
        found[f"{name}, backward"] = count(losses[0].backward)

    add("POET", lambda: poet(torch.randn(4096, 512)).sum())
    for memory in get_args(Memory):
        pit = mt.PIT(1000, 64, memory=memory)
        add(f"PIT, {memory}", partial(_token_loss, pit, ids))
    return found


def main() -> None:
    table = Table("operation", *Counts._fields)
    for name, counts in measure().items():
        table.add_row(name, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    main()
