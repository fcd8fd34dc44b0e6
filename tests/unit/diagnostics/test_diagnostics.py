"""Diagnostics against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manifold_tying as mt
from manifold_tying.diagnostics import condition, defect, delta_ti

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
    assert delta_ti(E, torch.linalg.pinv(E)) < 1e-12
    assert delta_ti(*mt.PIT.from_embedding(E, transform="head").materialize()) < 1e-12
    assert delta_ti(E, E.T) > 1
    tied = mt.TransposeTying(50, 8)
    assert delta_ti(*tied.materialize()) > 1
    E.requires_grad_()
    assert isinstance(delta_ti(E, E.T), float)
    # In float64 whatever comes in: bfloat16 sums of 50 products would be off by far more.
    half = E.detach().bfloat16()
    assert delta_ti(half, half.T) == pytest.approx(delta_ti(half.double(), half.double().T), rel=1e-12)


def test_delta_ti_errors() -> None:
    for E, W_out in ((torch.zeros(5, 3), torch.zeros(3, 4)), (torch.zeros(3), torch.zeros(3))):
        with pytest.raises(ValueError, match="W_out"):
            delta_ti(E, W_out)


@CASES
@given(d=st.integers(1, 12), decades=st.floats(0, 6), seed=st.integers(0, 10**6))
def test_condition_is_numpys(d: int, decades: float, seed: int) -> None:
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]
    T = (Q * np.logspace(0, decades, d)) @ Q.T
    T = (T + T.T) / 2
    # Eigenvalues are off by rounding of the largest, so their ratio by that times the condition.
    assert condition(torch.from_numpy(T)) == pytest.approx(np.linalg.cond(T), rel=1e-13 * 10**decades * d + 1e-12)


def test_condition_of_an_interface() -> None:
    pit = mt.PIT(30, 5, memory="frozen").double()
    assert condition(pit.transform) == pytest.approx(1, abs=1e-6)
    pit.cholesky_factor = torch.diag(torch.tensor([1.0, 1.0, 2.0, 1.0, 10.0], dtype=torch.float64))
    assert condition(pit.transform) == pytest.approx(100)


@CASES
@given(
    n=st.integers(1, 20), p=st.integers(1, 20), batch=st.sampled_from([(), (3,), (2, 1)]), seed=st.integers(0, 10**6)
)
def test_defect_is_the_formula_per_matrix(n: int, p: int, batch: tuple[int, ...], seed: int) -> None:
    X = np.random.default_rng(seed).normal(size=(*batch, n + p, p))
    expected = np.linalg.norm(np.swapaxes(X, -1, -2) @ X - np.eye(p), axis=(-2, -1)) / p**0.5
    np.testing.assert_allclose(defect(torch.from_numpy(X)).numpy(), expected, rtol=1e-12)


def test_defect_of_orthonormal_columns() -> None:
    Q = torch.linalg.qr(torch.randn(40, 7, dtype=torch.float64))[0]
    assert defect(Q) < 1e-14
    # d/dε of ‖(1 + ε)²I - I‖_F / √p is 2: the number is relative to √p, not to the size.
    assert defect(Q * 1.001).item() == pytest.approx(2e-3, rel=1e-3)
    assert defect(Q.float()) < 1e-6 and defect(Q.float()).dtype == torch.float64
