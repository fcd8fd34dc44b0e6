"""Weights W = U diag(s) Vᵀ: nearest matrices by NumPy's SVD, and the products of a linear layer."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from layers import Stack
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups

LAYERS: dict[str, Any] = {
    "tall": lambda: nn.Linear(7, 12),
    "wide": lambda: nn.Linear(12, 7),
    "convolution": lambda: nn.Conv2d(3, 8, 2),
    "embedding": lambda: nn.Embedding(9, 6),
    "stack": Stack,
    "float64": lambda: nn.Linear(6, 6, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(6, 6, dtype=torch.bfloat16),
}


def flat(weight: Any) -> Any:
    """The matrices of a weight in float64: kernels flattened."""
    matrix = weight.detach().double().numpy()
    return matrix.reshape(len(matrix), -1) if matrix.ndim == 4 else matrix


def nearest(matrix: Any, rank: int, spectrum: str, kept: Any) -> Any:
    """The nearest matrix of that rank and spectrum; ``kept``: the values of a fixed one."""
    U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
    s = s[..., :rank]
    values = {"free": s, "equal": s.mean(-1, keepdims=True) + 0 * s, "fixed": s if kept is None else kept}[spectrum]
    return U[..., :rank] * values[..., None, :] @ Vh[..., :rank, :]


@pytest.mark.parametrize("spectrum", ["free", "fixed", "equal"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_becomes_the_nearest_one(kind: str, spectrum: Any) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    dtype, shape, before = layer.weight.dtype, layer.weight.shape, flat(layer.weight)
    kept = np.linalg.svd(before, compute_uv=False)[..., :3]
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert mt.low_rank(layer, rank=3, spectrum=spectrum) is layer
    assert (layer.weight.dtype, layer.weight.shape) == (dtype, shape) and all(
        p.is_contiguous() for p in layer.parameters()
    )
    np.testing.assert_allclose(flat(layer.weight), nearest(before, 3, spectrum, None), atol=bound)
    assigned = torch.randn(shape).to(dtype)
    layer.weight = assigned
    np.testing.assert_allclose(flat(layer.weight), nearest(flat(assigned), 3, spectrum, kept), atol=2 * bound)


def test_the_full_rank_keeps_the_weight_and_isospectral_its_values() -> None:
    for constrain in (mt.low_rank, mt.isospectral):
        layer = nn.Linear(9, 6)
        before = layer.weight.detach().clone()
        values = torch.linalg.svdvals(before)
        constrain(layer)
        torch.testing.assert_close(layer.weight, before)
        optimizer = RiemannianAdam(layer.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            (layer(torch.randn(8, 9)) - 1).square().mean().backward()
            optimizer.step()
        moved = torch.linalg.svdvals(layer.weight) - values
        assert (layer.weight - before).abs().max() > 0.1
        assert (moved.abs().max() < 1e-6) == (constrain is mt.isospectral)


@pytest.mark.parametrize("spectrum", ["free", "fixed", "equal"])
@pytest.mark.parametrize("tokens", [1, 500])
def test_a_linear_layer_multiplies_by_the_factors(tokens: int, spectrum: Any) -> None:
    layer: Any = mt.low_rank(nn.Linear(12, 9, dtype=torch.float64), rank=4, spectrum=spectrum)
    x = torch.randn(2, tokens, 12, dtype=torch.float64, requires_grad=True)
    G = torch.randn(2, tokens, 9, dtype=torch.float64)
    stored = list(layer.parameters())
    output = layer(x)
    gradients = torch.autograd.grad((output * G).sum(), [x, *stored])
    whole = linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(output, whole)
    for actual, expected in zip(gradients, torch.autograd.grad((whole * G).sum(), [x, *stored]), strict=True):
        torch.testing.assert_close(actual, expected)


def test_thin_products_take_half_the_operations_and_save_nothing_of_the_weights_size() -> None:
    x = torch.randn(1024, 64)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def operations(layer: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        return counter.get_total_flops()

    plain = operations(nn.Linear(64, 64))
    layer = mt.low_rank(nn.Linear(64, 64), rank=16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        ratio = operations(layer) / plain
    assert ratio == 0.625  # x needs no gradient, which the second of the thin products does
    assert all(tensor.shape != (64, 64) for tensor in saved)
    whole = mt.low_rank(nn.Linear(64, 64), rank=60)
    assert operations(whole) < 1.2 * plain


def test_few_directions_of_a_large_weight_are_found_without_its_whole_svd() -> None:
    generator = torch.Generator().manual_seed(1)
    U, V = (torch.linalg.qr(torch.randn(n, 200, generator=generator).double()).Q for n in (300, 200))
    values = 0.9 ** torch.arange(200.0).double()
    exact = (U[:, :5] * values[:5]) @ V[:, :5].mT
    for weight, best in ((U * values) @ V.mT, (values[5:] ** 2).sum().sqrt()), (exact, torch.tensor(0.0)):
        layer = nn.Linear(200, 300, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight)
        mt.low_rank(layer, rank=5)
        assert (layer.weight - weight).norm() <= 1.001 * best + 1e-12
        again = nn.Linear(200, 300, dtype=torch.float64)
        with torch.no_grad():
            again.weight.copy_(weight)
        assert torch.equal(mt.low_rank(again, rank=5).weight, layer.weight)


def test_the_layer_is_materialized_to_the_same_parameter() -> None:
    layer: Any = nn.Linear(8, 6)
    weight = layer.weight
    mt.low_rank(layer, rank=2)
    optimizer = RiemannianAdam(param_groups(layer), lr=0.1)
    assert layer.parametrizations.weight.original0 is weight and weight.shape == (6, 2)
    value = layer.weight.detach().clone()
    assert mt.materialize(layer).weight is weight and torch.equal(weight, value)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"constraint of parametrizations.weight.original\d was removed"):
        optimizer.step()


def test_groups_have_two_points_and_a_free_spectrum() -> None:
    model = nn.Sequential(mt.low_rank(nn.Linear(8, 6), rank=2), nn.Linear(6, 6))
    groups = param_groups(model, manifold_lr=0.5, weight_decay=0.1, overrides={"1.weight": {"lr": 7.0}})
    found = {name: group for group in groups for name in group["names"]}
    stored = "0.parametrizations.weight.original"
    assert [("manifold" in found[stored + i], found[stored + i]["weight_decay"]) for i in "012"] == [
        (True, 0.0), (True, 0.0), (False, 0.0)
    ]  # fmt: skip
    (group,) = (
        g for g in param_groups(model, overrides={"0.weight": {"lr": 7.0}}) if g.get("lr") == 7.0 and "manifold" in g
    )
    assert group["names"] == [stored + "0", stored + "1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: mt.low_rank(layer, rank=7), r"expected rank to be at most 6 for Linear.weight \(6, 8\), got 7"),
        (lambda layer: mt.low_rank(layer, rank=0), r"rank"),
        (lambda layer: mt.low_rank(layer, spectrum=cast(Any, "flat")), r"unknown spectrum 'flat'; choose one of free"),
        (lambda layer: mt.isospectral(layer.apply(lambda m: nn.init.zeros_(m.weight))), r"it is zero and would stay so"),
        (lambda layer: mt.low_rank(layer, "bias"), r"expected Linear.bias to be a matrix"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    layer = nn.Linear(8, 6)
    with pytest.raises(ValueError, match=message):
        change(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"] and layer.weight.shape == (6, 8)


def test_a_zero_weight_can_start_to_grow() -> None:
    layer = nn.Linear(8, 6)
    nn.init.zeros_(layer.weight)
    mt.low_rank(layer, rank=2)
    optimizer = RiemannianAdam(param_groups(layer), lr=0.1)
    first: Tensor | None = None
    for _ in range(50):
        optimizer.zero_grad()
        loss = (layer(torch.eye(8)) - torch.ones(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        first = loss.detach() if first is None else first
    assert first is not None and loss < 0.1 * first


@pytest.mark.parametrize("constrain", [mt.isospectral, lambda layer: mt.low_rank(layer, rank=4)])
def test_an_embedding_keeps_its_padding(constrain: Any) -> None:
    torch.manual_seed(0)
    table = constrain(nn.Embedding(20, 8, padding_idx=0))
    optimizer = RiemannianAdam(table.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        table(torch.randint(1, 20, (30,))).sin().sum().backward()
        optimizer.step()
    assert not table.weight[0].any() and table.weight[1:].norm(dim=1).min() > 0.01
