"""Diagnostics against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manifold_tying as mt
from manifold_tying.diagnostics import delta_ti

CASES = settings(max_examples=20, deadline=None, derandomize=True)


@CASES
@given(V=st.integers(1, 30), d=st.integers(1, 12), seed=st.integers(0, 10**6), double=st.booleans())
def test_delta_ti_is_the_formula(V: int, d: int, seed: int, double: bool) -> None:
    rng = np.random.default_rng(seed)
    E, W_out = (rng.normal(size=shape).astype(np.float64 if double else np.float32) for shape in ((V, d), (d, V)))
    expected = np.linalg.norm(W_out.astype(np.float64) @ E.astype(np.float64) - np.eye(d))
    found = delta_ti(torch.from_numpy(E), torch.from_numpy(W_out))
    assert isinstance(found, float) and found == pytest.approx(expected, rel=1e-10)


def test_delta_ti_separates_the_interfaces() -> None:
    """Zero for the pseudo-inverse of any table and for PIT; transpose tying has E0ᵀE0, which is no identity."""
    E = torch.randn(50, 8, dtype=torch.float64)
    assert delta_ti(*mt.PIT.from_embedding(E, transform="head").materialize()) < 1e-12
    assert delta_ti(E.requires_grad_(), E.T) > 1
    # In float64 whatever comes in: bfloat16 sums of 50 products would be off by far more.
    half = E.detach().bfloat16()
    assert delta_ti(half, half.T) == pytest.approx(delta_ti(half.double(), half.double().T), rel=1e-12)


def test_delta_ti_errors() -> None:
    for E, W_out in ((torch.zeros(5, 3), torch.zeros(3, 4)), (torch.zeros(3), torch.zeros(3))):
        with pytest.raises(ValueError, match="W_out"):
            delta_ti(E, W_out)
