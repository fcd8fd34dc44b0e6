"""interface_consistency against scipy and explicit formulas in float64."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manifold_tying as mt
from manifold_tying.diagnostics import bases, interface_consistency

CASES = settings(max_examples=25, deadline=None, derandomize=True)
NAMES = (
    "delta_ti", "cosine_distance", "procrustes_error", "principal_angle", "anchor_cosine_distance", "anchor_procrustes_error",
)  # fmt: skip


def tables(V: int, d: int, seed: int, near: float) -> tuple[np.ndarray, np.ndarray]:
    """E and a W_out that is its pseudo-inverse but for a share `near` of noise."""
    rng = np.random.default_rng(seed)
    E = rng.normal(size=(V, d)) @ np.diag(np.logspace(0, 1, d))
    W = np.linalg.pinv(E)
    return E, W + near * rng.normal(size=W.shape) * np.abs(W).mean()


def row_distance(A: np.ndarray, B: np.ndarray) -> float:
    cosines = (A * B).sum(1) / np.linalg.norm(A, axis=1) / np.linalg.norm(B, axis=1)
    return float(1 - cosines.mean())


def procrustes(A: np.ndarray, B: np.ndarray) -> float:
    R, _ = scipy.linalg.orthogonal_procrustes(B, A)
    return float(np.linalg.norm(A - B @ R) / np.linalg.norm(A))


def oracle(E: np.ndarray, W: np.ndarray) -> dict[str, float]:
    U, Q = scipy.linalg.polar(E)[0], scipy.linalg.polar(W.T)[0]
    anchors = np.linalg.pinv(W)
    return {
        "delta_ti": float(np.linalg.norm(W @ E - np.eye(E.shape[1]))),
        "cosine_distance": row_distance(U, Q),
        "procrustes_error": procrustes(U, Q),
        "principal_angle": float(scipy.linalg.subspace_angles(E, W.T).max()),
        "anchor_cosine_distance": row_distance(E, anchors),
        "anchor_procrustes_error": procrustes(E, anchors),
    }


@CASES
@given(
    d=st.integers(1, 10),
    extra=st.integers(0, 60),
    seed=st.integers(0, 10**6),
    near=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_every_number_is_the_formula(d: int, extra: int, seed: int, near: float, dtype: torch.dtype) -> None:
    # the formulas get the rounded tables: nothing may be lost after that
    E, W = (torch.from_numpy(table).to(dtype) for table in tables(d + extra, d, seed, near))
    found = dataclasses.asdict(interface_consistency(E, W))
    expected = oracle(E.double().numpy(), W.double().numpy())
    assert tuple(found) == NAMES
    # the explicit formulas themselves cancel: √eps where they take a cosine
    for name in NAMES:
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=2e-8 * E.double().norm().item()), name


def test_small_angles_are_exact() -> None:
    """A known angle of 1e-9 comes out, where the arc cosine of a float64 cosine gives 0 or 1e-8."""
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(60, 12)))[0]
    for angle in (1e-12, 1e-9, 1e-4, 1.0, np.pi / 2 - 1e-9):
        turned = Q[:, :6].copy()
        turned[:, 0] = np.cos(angle) * Q[:, 0] + np.sin(angle) * Q[:, 6]
        E = Q[:, :6] @ rng.normal(size=(6, 6))
        W = (turned @ rng.normal(size=(6, 6))).T
        found = interface_consistency(torch.from_numpy(E), torch.from_numpy(W))
        assert found.principal_angle == pytest.approx(angle, rel=1e-6, abs=1e-13)
        assert found.principal_angle == pytest.approx(scipy.linalg.subspace_angles(E, W.T).max(), rel=1e-6, abs=1e-13)
    # 1 - cos of nearly equal rows, and the Procrustes error of nearly equal bases
    shift = torch.from_numpy(Q[:, :6]) + 1e-9 * torch.from_numpy(Q[:, 6:])
    found = interface_consistency(torch.from_numpy(Q[:, :6]), shift.T)
    assert found.procrustes_error == pytest.approx(1e-9, rel=1e-6)
    assert found.anchor_procrustes_error == pytest.approx(1e-9, rel=1e-6)
    assert 0 < found.cosine_distance < 1e-16 and 0 < found.anchor_cosine_distance < 1e-16


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_pit_is_consistent_by_both_definitions(kind: str) -> None:
    """At most 1e-6 rad from float32 tables, where the paper prints 0.002."""
    pit = mt.PIT(300, 16, memory="trainable")
    if kind == "trained":
        Q = torch.linalg.qr(torch.randn(16, 16))[0]
        pit.cholesky_factor = torch.linalg.cholesky((Q * torch.logspace(-0.5, 0.5, 16)) @ Q.T).contiguous()
    E, W_out = pit.materialize()
    assert E.dtype == torch.float32
    found = interface_consistency(E, W_out)
    assert all(value <= 1e-6 for value in dataclasses.asdict(found).values() if value is not found.delta_ti)
    assert found.delta_ti / 4 <= 1e-6
    exact = interface_consistency(*pit.double().materialize())
    assert max(dataclasses.asdict(exact).values()) <= 1e-12
    # negative control: what a float32 arc cosine makes of these tables
    U, Q32 = (torch.from_numpy(scipy.linalg.polar(t.numpy())[0]) for t in (E, W_out.T))
    noise = torch.linalg.svdvals(U.T @ Q32).clamp(max=1).acos().max()
    assert kind == "frozen" or noise > 1e-4


def test_transpose_tying_is_zero_by_polar_factors_and_not_by_anchors() -> None:
    E = torch.from_numpy(tables(200, 8, 0, 0)[0]).float()
    found = interface_consistency(E, E.T)
    assert found.cosine_distance == 0 and found.procrustes_error < 1e-14 and found.principal_angle < 1e-14
    assert found.anchor_cosine_distance > 0.05 and found.anchor_procrustes_error > 0.3 and found.delta_ti > 1
    # Only a table with EᵀE = I is its own pseudo-inverse.
    Q = mt.linalg.polar(E.double())[0]
    assert max(dataclasses.asdict(interface_consistency(Q, Q.T)).values()) < 1e-13
    # and untied tables differ by every one of them
    untied = interface_consistency(E, torch.randn(8, 200))
    assert min(dataclasses.asdict(untied).values()) > 0.3


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    E, W = (torch.from_numpy(table) for table in tables(103, 5, 3, 0.5))
    whole = dataclasses.asdict(interface_consistency(E, W))
    monkeypatch.setattr(bases, "_BLOCK_ENTRIES", 1)
    assert [len(block) for block in bases.table_blocks(E)] == [20, 20, 20, 20, 20, 3]
    for name, value in dataclasses.asdict(interface_consistency(E, W)).items():
        assert value == pytest.approx(whole[name], rel=1e-10), name


def test_ill_conditioned_tables() -> None:
    """A Gram matrix would square a condition of 1e7 past what float64 resolves."""
    rng = np.random.default_rng(1)
    Q = np.linalg.qr(rng.normal(size=(80, 6)))[0]
    T = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    T = (T * np.logspace(0, 7, 6)) @ T.T
    found = interface_consistency(torch.from_numpy(Q @ np.linalg.inv(T)), torch.from_numpy(T @ Q.T))
    assert found.principal_angle < 1e-8 and found.procrustes_error < 1e-8 and found.anchor_procrustes_error < 1e-6


def test_tokens_without_a_vector() -> None:
    """Padding rows: nothing on both sides agrees, a vector on one side only does not."""
    E, W = (torch.from_numpy(table) for table in tables(40, 4, 2, 0.1))
    E[3] = 0
    W[:, 3] = 0
    inner = interface_consistency(E, W)
    rest = [v for v in range(40) if v != 3]
    without = interface_consistency(E[rest], W[:, rest])
    assert inner.cosine_distance == pytest.approx(without.cosine_distance * 39 / 40)
    E[4] = 0
    one_sided = interface_consistency(E, W)
    anchors = torch.linalg.pinv(W)
    expected = 1 - torch.cosine_similarity(E, anchors, dim=1, eps=0).nan_to_num(0)
    expected[3] = 0
    assert one_sided.anchor_cosine_distance == pytest.approx(expected.mean().item(), rel=1e-6)


GOOD = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("E", "W_out", "message"),
    [
        (GOOD, GOOD, r"expected E \(V, d\) and W_out \(d, V\)"),
        (GOOD.T, GOOD, "n >= p"),
        (GOOD.long(), GOOD.long().T, "floating"),
        (GOOD, torch.full_like(GOOD.T, torch.inf), "finite"),
        (GOOD, torch.zeros_like(GOOD.T), "expected W_out of full column rank"),
        (torch.cat([GOOD[:, :3], GOOD[:, :1]], 1), GOOD.T, "duplicate columns"),
    ],
)
def test_errors(E: Any, W_out: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interface_consistency(E, W_out)
