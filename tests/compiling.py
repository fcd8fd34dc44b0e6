"""Eager code that takes the ways of compiled code."""

import pytest
import torch


def as_if_compiled(patch: pytest.MonkeyPatch) -> None:
    """Let ``torch.compiler.is_compiling()`` be true from here on."""
    # torch 2.11 notes at its first compilation which function that is, and would not know the real one afterwards.
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    patch.setattr(torch.compiler, "is_compiling", lambda: True)
