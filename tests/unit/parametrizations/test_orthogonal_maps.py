"""A weight that ``mt.orthogonal`` makes orthonormal stays orthonormal, wherever training takes its stored tensor."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from layers import Stack, stored
from torch import nn

import manifold_tying as mt
from manifold_tying import linalg


@pytest.mark.parametrize("shape", [(9, 8), (8, 12), (63, 63), (64, 64), (192, 160)])
def test_the_cayley_map_is_orthonormal_however_far_its_tensor_has_moved(shape: tuple[int, int]) -> None:
    sizes = (10.0, 1e4) if shape[0] < 100 else (10.0,)
    for seed, size in itertools.product(range(10), sizes):  # the worst of ten is a hundred times the median
        torch.manual_seed(seed)
        module = mt.orthogonal(nn.Linear(shape[1], shape[0], bias=False), map="cayley")
        with torch.no_grad():
            stored(module).add_(torch.randn_like(stored(module)), alpha=size)
        weight = module.weight.detach()
        weight = weight if shape[0] >= shape[1] else weight.T
        assert linalg.defect(weight) < (2e-7 if shape[0] < 100 else 5e-7)


def test_polar_and_qr_are_the_factors_of_the_stored_tensor() -> None:
    Y = torch.randn(6, 4, dtype=torch.float64)
    Q, R = np.linalg.qr(Y.numpy())
    expected: dict[Any, Any] = {"qr": Q * np.sign(R.diagonal()), "polar": scipy.linalg.polar(Y.numpy())[0]}
    for map, weight in expected.items():
        module = mt.orthogonal(nn.Linear(4, 6, dtype=torch.float64), map=map)
        stored(module).data.copy_(Y)
        np.testing.assert_allclose(module.weight.detach().numpy(), weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(24, 40), (64, 64)])
def test_ordinary_training_leaves_the_series_orthonormal(shape: tuple[int, int]) -> None:
    """The other maps are under check_parametrization; this one leaves where the bare series is orthonormal."""
    torch.manual_seed(0)
    module: Any = mt.orthogonal(nn.Linear(shape[1], shape[0]), map="cayley-neumann")
    x, target = torch.randn(128, shape[1]), torch.randn(128, shape[0])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (module(x) - target).square().sum().backward()
        optimizer.step()
    weight = module.weight.detach()
    assert linalg.defect(weight if shape[0] >= shape[1] else weight.T) < 1e-6
    base = module.parametrizations.weight[0].base
    assert linalg.defect(linalg.cayley_at(base, stored(module).detach(), 2)) > 0.1  # negative control


@pytest.mark.parametrize("b", [4, 31])
@pytest.mark.parametrize("size", [1.0, 1e8])
def test_the_cayley_map_of_large_skew_matrices(b: int, size: float) -> None:
    torch.manual_seed(0)
    A = torch.randn(8, b, b) * size
    A = (A - A.mT).requires_grad_()
    C = linalg.cayley(A)
    assert linalg.defect(C.detach()).max() < 5e-7
    cotangent = torch.randn_like(C)
    (gradient,) = torch.autograd.grad(C, A, cotangent)
    wide = A.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(linalg.cayley(wide), wide, cotangent.double())
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("map", ["polar", "qr", "cayley", "cayley-neumann"])
def test_special_weights_are_rotations_wherever_their_tensor_goes(map: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])) @ torch.linalg.qr(layer.weight).Q)
        layer.weight[0] *= -torch.linalg.det(layer.weight).sign()  # a reflection
        U, _, Vh = torch.linalg.svd(layer.weight)
        U[:, -1] *= -1
    module: Any = mt.orthogonal(layer, map=map, special=True)
    torch.testing.assert_close(module.weight, U @ Vh)  # the nearest rotation
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            stored(module).normal_(std=3)
        assert linalg.defect(module.weight.detach()) < 1e-6 and torch.linalg.det(module.weight) > 0.99
    module.weight = -module.weight.detach()
    assert torch.linalg.det(module.weight) > 0.99
    for other in (nn.Linear(5, 3), Stack()):
        with pytest.raises(ValueError, match=r"expected \w+.weight .* to be square for special=True"):
            mt.orthogonal(other, map=map, special=True)


@pytest.mark.parametrize("map", ["polar", "qr", "cayley", "cayley-neumann"])
def test_special_weights_are_rotations_where_the_product_of_pivots_underflows(map: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 512, bias=False)
    Q = torch.linalg.qr(layer.weight.detach()).Q
    assert torch.linalg.det(Q) == 0  # in float32, though Q is orthogonal
    Q[0] *= -torch.linalg.det(Q.double()).sign().float()
    with torch.no_grad():
        layer.weight.copy_(Q)
    weight = mt.orthogonal(layer, map=map, special=True).weight.detach().double()
    assert linalg.defect(weight) < 1e-5 and abs(torch.linalg.det(weight) - 1) < 1e-3
