"""Training that keeps singular values, against straight-line forms of two isospectral optimizers in NumPy."""

import numpy as np
import scipy.linalg
import torch
from optim_cases import polar_np, tangent
from torch import nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianSGD, param_groups
from manifold_tying.poet import equivalences

LR = 0.05


def gradient(step: int, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(shape)


def test_isospectral_moves_as_iso_with_projected_momenta() -> None:
    """ISO (arXiv 2607.19331): both singular bases move by their own momentum and a polar retraction, the values stay."""
    layer = mt.isospectral(nn.Linear(5, 7, bias=False).double())
    W = layer.weight.detach().numpy().copy()
    U, s, Vt = np.linalg.svd(W, full_matrices=False)
    bases, momenta = [U, Vt.T], [np.zeros_like(U), np.zeros_like(Vt.T)]
    optimizer = RiemannianSGD(param_groups(layer), lr=LR, momentum=0.9)
    for step in range(12):
        G = gradient(step, W.shape)
        optimizer.zero_grad()
        layer.weight.backward(torch.from_numpy(G))
        optimizer.step()
        gradients = G @ bases[1] * s, G.T @ bases[0] * s
        for i, g in enumerate(gradients):
            momenta[i] = 0.9 * momenta[i] + tangent(bases[i], g)
        bases = [polar_np(X - LR * m) for X, m in zip(bases, momenta, strict=True)]
    expected = bases[0] * s @ bases[1].T
    assert np.abs(expected - W).max() > 0.1
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(np.linalg.svd(layer.weight.detach().numpy())[1], s, atol=1e-12)


def merged_every_step(W: np.ndarray, lr: float, steps: int) -> np.ndarray:
    """POET by SGD, with one block a side that is merged into W0 after each step."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False).double()
    layer.weight.data = torch.from_numpy(W.copy())
    mt.equivalence(layer, block_size=max(W.shape), init="keep", terms=None)
    ((_, _, skew),) = equivalences(layer)
    for step in range(steps):
        skew.grad = None
        layer.weight.backward(torch.from_numpy(gradient(step, W.shape)))
        assert skew.grad is not None
        with torch.no_grad():
            skew -= lr / 4 * skew.grad  # an entry is in two places of A, and the map turns by 2 A
        mt.merge(layer)
    return layer.weight.detach().numpy()


def pion(W: np.ndarray, lr: float, steps: int) -> np.ndarray:
    """W <- exp(A) W exp(B) along the skew parts of the gradient (Pion, arXiv 2605.12492), without momentum."""
    for step in range(steps):
        G = gradient(step, W.shape)
        A, B = (M - M.T for M in (G @ W.T, W.T @ G))
        W = scipy.linalg.expm(-lr * A) @ W @ scipy.linalg.expm(-lr * B)
    return W


def test_poet_merged_at_every_step_is_pion_to_third_order() -> None:
    W = np.random.default_rng(0).standard_normal((5, 7)) / 3
    off = [np.abs(merged_every_step(W, lr, 3) - pion(W, lr, 3)).max() for lr in (0.02, 0.01)]
    assert 5 < off[0] / off[1] < 12 and off[0] < 0.02 * np.abs(pion(W, 0.02, 3) - W).max()
    found = merged_every_step(W, 0.02, 50)
    np.testing.assert_allclose(np.linalg.svd(found)[1], np.linalg.svd(W)[1], atol=1e-6)
    assert np.abs(found - W).max() > 0.1
