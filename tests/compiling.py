"""Eager code that takes the ways of compiled code, and a loss that compiles fast."""

import pytest
import torch


def as_if_compiled(patch: pytest.MonkeyPatch) -> None:
    """Let ``torch.compiler.is_compiling()`` be true from here on."""
    # torch 2.11 notes at its first compilation which function that is, and would not know the real one afterwards.
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    patch.setattr(torch.compiler, "is_compiling", lambda: True)


def few_chunks(patch: pytest.MonkeyPatch) -> None:
    """Let a loss have few chunks, since each is traced and compiled on its own."""
    for name in ("CHUNKS", "CHUNKS_LOW_PRECISION"):
        patch.setattr(f"manifold_tying.tying._loss.{name}", 2)
