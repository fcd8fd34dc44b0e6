"""Diagnostics of orthogonal factors and spectra against numpy, scipy and sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import entropy, ortho_group

from manifold_tying.diagnostics import (
    hyperspherical_energy,
    orthogonality_error,
    singular_values,
    spectra,
    spectral_summary,
    svd_entropy,
    trace_probe,
    vector_probe,
)

CASES = settings(max_examples=20, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10**6)


def rotation(m: int, seed: int) -> np.ndarray:
    return ortho_group.rvs(m, random_state=seed)


@CASES
@given(m=st.integers(2, 20), seed=SEEDS, batch=st.sampled_from([(), (3,), (2, 1)]), one=st.booleans())
def test_vector_probe_is_the_cosine(m: int, seed: int, batch: tuple[int, ...], one: bool) -> None:
    rng = np.random.default_rng(seed)
    R, v = rng.normal(size=(*batch, m, m)), rng.normal(size=(m,) if one else (*batch, m))
    image = np.einsum("...ij,...j->...i", R, v)
    expected = (v * image).sum(-1) / np.linalg.norm(v, axis=-1) / np.linalg.norm(image, axis=-1)
    found = vector_probe(torch.from_numpy(R), torch.from_numpy(v))
    assert found.shape == batch and found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)
    # The angle, also where R is a little too long; vᵀRv alone would grow with it.
    np.testing.assert_allclose(vector_probe(1.1 * torch.from_numpy(R), torch.from_numpy(v)).numpy(), found, atol=1e-13)


def test_vector_probe_draws_the_same_vector_each_time() -> None:
    R = torch.from_numpy(rotation(50, 0))
    state = torch.get_rng_state()
    first = vector_probe(R)
    assert torch.equal(torch.get_rng_state(), state)
    assert vector_probe(R) == first
    assert vector_probe(torch.stack([R, R]))[1] == pytest.approx(float(first), abs=1e-14)  # another order of sums
    identity = torch.eye(50, dtype=torch.bfloat16, requires_grad=True)
    assert vector_probe(identity) == pytest.approx(1, abs=1e-14) and not vector_probe(identity).requires_grad
    assert vector_probe(-identity) == pytest.approx(-1, abs=1e-14)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_trace_probe_is_what_sampling_finds(orthogonal: bool) -> None:
    """And the paper's printed equation (13) is not: its last sign makes the spread too large."""
    m, samples = 12, 100_000
    R = np.random.default_rng(3).normal(size=(m, m)) / 4 + np.eye(m)
    if orthogonal:  # Cayley's, by angles as in training: tr R / m is 0.6
        Q = (R - R.T) / 2
        R = np.asarray(np.linalg.solve(np.eye(m) - Q, np.eye(m) + Q), np.float64)
    v = np.random.default_rng(4).normal(size=(samples, m))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    values = ((v @ R) * v).sum(1)
    mean, std = trace_probe(torch.from_numpy(R))
    assert mean.item() == pytest.approx(np.trace(R) / m, abs=1e-14)
    assert mean.item() == pytest.approx(values.mean(), abs=4 * values.std() / samples**0.5)
    assert std.item() == pytest.approx(values.std(), rel=0.015)
    if orthogonal:
        trace, square = np.trace(R), np.trace(R @ R)
        by_hand, printed = ((m + square + sign * 2 * trace**2 / m) / (m * (m + 2)) for sign in (-1, 1))
        assert std.item() == pytest.approx(by_hand**0.5, rel=1e-12)
        assert printed**0.5 > 1.1 * values.std()


def test_trace_probe_where_it_is_known() -> None:
    turn = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]], dtype=torch.float64)
    mirror = torch.diag(torch.tensor([1.0, -1.0]))  # v at angle t: cos 2t, whose mean square is 1/2
    mean, std = trace_probe(torch.stack([torch.eye(2).double(), turn, mirror.double()]))
    np.testing.assert_allclose(mean.numpy(), [1, math.cos(0.3), 0], atol=1e-15)
    np.testing.assert_allclose(std.numpy(), [0, 0, 0.5**0.5], atol=1e-15)
    # Near the identity the plain difference of (10) would have lost its digits; S - I is -angle²/2 on one plane of eight.
    near = torch.eye(8, dtype=torch.float64)
    near[0, 0] = near[1, 1] = math.cos(1e-3)
    near[1, 0], near[0, 1] = math.sin(1e-3), -math.sin(1e-3)
    expected = 5e-7 * (2 / 80) ** 0.5 * (2 * 0.75**2 + 6 * 0.25**2) ** 0.5
    assert trace_probe(near).std.item() == pytest.approx(expected, rel=1e-6)


@CASES
@given(m=st.integers(1, 20), batch=st.sampled_from([(), (3,), (2, 1)]), seed=SEEDS)
def test_orthogonality_error_is_the_formula(m: int, batch: tuple[int, ...], seed: int) -> None:
    R = np.random.default_rng(seed).normal(size=(*batch, m, m))
    expected = np.linalg.norm(R @ np.swapaxes(R, -1, -2) - np.eye(m), axis=(-2, -1)) / np.linalg.norm(np.eye(m))
    np.testing.assert_allclose(orthogonality_error(torch.from_numpy(R)).numpy(), expected, rtol=1e-11)


@CASES
@given(m=st.integers(1, 15), n=st.integers(1, 15), batch=st.sampled_from([(), (3,), (2, 1)]), seed=SEEDS)
def test_singular_values_are_numpys_and_survive_rotations(m: int, n: int, batch: tuple[int, ...], seed: int) -> None:
    W = np.random.default_rng(seed).normal(size=(*batch, m, n))
    found = singular_values(torch.from_numpy(W))
    assert found.shape == (*batch, min(m, n)) and found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), np.linalg.svd(W, compute_uv=False), atol=1e-12)
    if m > 1 and n > 1:
        turned = rotation(m, seed) @ W @ rotation(n, seed + 1)
        np.testing.assert_allclose(singular_values(torch.from_numpy(turned)).numpy(), found, atol=1e-12)


@CASES
@given(m=st.integers(2, 15), n=st.integers(2, 15), batch=st.sampled_from([(), (3,)]), seed=SEEDS)
def test_spectral_summary_is_scipys(m: int, n: int, batch: tuple[int, ...], seed: int) -> None:
    W = np.random.default_rng(seed).normal(size=(*batch, m, n))
    sigma = np.linalg.svd(W, compute_uv=False)
    found = spectral_summary(torch.from_numpy(W))
    even = entropy(sigma**2, base=min(m, n), axis=-1)
    stable_rank = np.linalg.norm(W, axis=(-2, -1)) ** 2 / np.linalg.norm(W, ord=2, axis=(-2, -1)) ** 2
    expected = sigma[..., 0], sigma[..., -1], np.linalg.cond(W), even, stable_rank
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-9)
    np.testing.assert_array_equal(svd_entropy(torch.from_numpy(W)), found.entropy)
    # Of the squares, not of the values, which are more even.
    assert (found.entropy.numpy() < entropy(sigma, base=min(m, n), axis=-1)).all()


def test_entropy_where_it_is_known() -> None:
    Q = torch.from_numpy(rotation(9, 0))
    assert svd_entropy(1e-200 * Q[:, :5]).item() == pytest.approx(1, abs=1e-12)
    assert svd_entropy(torch.outer(Q[0], Q[1])).item() == pytest.approx(0, abs=1e-12)
    assert svd_entropy(torch.diag(torch.tensor([1.0, 1, 0, 0]))).item() == pytest.approx(0.5, abs=1e-12)
    assert spectral_summary(torch.diag(torch.tensor([2.0, 0]))).condition == math.inf
    with pytest.raises(ValueError, match="two singular"):
        svd_entropy(torch.ones(5, 1))
    with pytest.raises(ValueError, match="zero"):
        spectral_summary(torch.stack([torch.eye(3), torch.zeros(3, 3)]))


@CASES
@given(n=st.integers(1, 40), d=st.integers(2, 8), entries=st.integers(1, 2000), seed=SEEDS)
def test_hyperspherical_energy_is_the_sum_over_pairs(n: int, d: int, entries: int, seed: int) -> None:
    W = np.random.default_rng(seed).normal(size=(2, n, d))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectra, "_BLOCK_ENTRIES", entries)
        found = hyperspherical_energy(torch.from_numpy(W))
    unit = W / np.linalg.norm(W, axis=-1, keepdims=True)
    assert found.shape == (2,) and found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), [2 * (1 / pdist(rows)).sum() for rows in unit], rtol=1e-9)


def test_hyperspherical_energy_keeps_under_right_rotations_only() -> None:
    rng = np.random.default_rng(0)
    W = torch.from_numpy(rng.normal(size=(20, 6)))
    R, P = torch.from_numpy(rotation(20, 1)), torch.from_numpy(rotation(6, 2))
    energy = hyperspherical_energy(W).item()
    lengths = torch.from_numpy(rng.uniform(1e-150, 1e150, size=(20, 1)))
    for same in (W @ P, lengths * W):
        assert hyperspherical_energy(same).item() == pytest.approx(energy, rel=1e-12)
    for other, least in ((R @ W, 1e-3), (W + 1, 1e-2)):
        assert abs(hyperspherical_energy(other).item() / energy - 1) > least


def test_hyperspherical_energy_where_it_is_known() -> None:
    poles = torch.tensor([[3.0, 0], [-1, 0]])  # two ordered pairs at distance 2
    assert hyperspherical_energy(poles).item() == pytest.approx(1)
    simplex = torch.eye(5, dtype=torch.float64) - 0.2  # five points, each two of them sqrt(2 * 5/4) apart
    assert hyperspherical_energy(simplex).item() == pytest.approx(20 / 2.5**0.5)
    close = torch.tensor([[1, 0], [1, 1e-9]], dtype=torch.float64)  # inner products see no difference below 1e-8
    assert hyperspherical_energy(close).item() == pytest.approx(2e9, rel=1e-6)
    assert hyperspherical_energy(torch.tensor([[1.0, 2], [2, 4], [0, 1]])) == math.inf
    assert hyperspherical_energy(torch.ones(1, 3)) == 0


def test_what_is_no_rotation_and_no_weight_is_refused() -> None:
    for call in (vector_probe, trace_probe, orthogonality_error):
        with pytest.raises(ValueError, match="square"):
            call(torch.ones(3, 4))
        with pytest.raises(ValueError, match="dtype"):
            call(torch.ones(3, 3, dtype=torch.complex64))
    for v in (torch.ones(4), torch.zeros(3)):
        with pytest.raises(ValueError, match="expected v"):
            vector_probe(torch.eye(3), v)
    for weights in (singular_values, spectral_summary, hyperspherical_energy):
        for shape in ((3,), (0, 3)):
            with pytest.raises(ValueError, match="got"):
                weights(torch.ones(shape))
        with pytest.raises(ValueError, match="NaN"):
            weights(torch.tensor([[1.0, math.nan], [0, 1]]))
    with pytest.raises(ValueError, match="nonzero rows"):
        hyperspherical_energy(torch.tensor([[1.0, 0], [0, 0]]))
