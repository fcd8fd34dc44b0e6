"""Doubly stochastic matrices: plain Sinkhorn rounds in float64 and differences of gradients are the oracles."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from manifold_tying.linalg import orthostochastic, sinkhorn

MAPS = [sinkhorn, orthostochastic]
SIZES = [1, 2, 4, 16, 17]  # from 17 on LAPACK solves


def plain(M: Tensor) -> Tensor:
    """10,000 rounds of Sinkhorn on e^M."""
    P = np.exp(M.detach().double().numpy())
    for _ in range(10_000):
        P = P / P.sum(-1, keepdims=True)
        P = P / P.sum(-2, keepdims=True)
    return torch.from_numpy(P)


def off(P: Tensor) -> float:
    """The largest deviation of a sum from 1."""
    return max(float((P.double().sum(dim) - 1).abs().max()) for dim in (-2, -1))


@pytest.mark.parametrize("n", SIZES)
def test_sinkhorn_is_the_limit_of_its_rounds(n: int) -> None:
    M = torch.randn(2, 3, n, n, dtype=torch.float64)
    expected = plain(M)
    torch.testing.assert_close(sinkhorn(M), expected, rtol=1e-12, atol=1e-15)
    single = M.float()
    torch.testing.assert_close(sinkhorn(single), plain(single).float(), rtol=3e-6, atol=0)
    for i, j in np.ndindex(2, 3):
        torch.testing.assert_close(sinkhorn(M[i, j]), expected[i, j], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scale", [1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_1_to_rounding(dtype: torch.dtype, scale: float) -> None:
    for n in SIZES:
        P = sinkhorn(scale * torch.randn(20, n, n, dtype=dtype))
        assert P.min() >= 0 and off(P) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthostochastic_squares_the_entries_of_a_rotation(n: int, dtype: torch.dtype) -> None:
    A = torch.randn(20, n, n, dtype=dtype)
    K = (A - A.mT).double().numpy() / 2
    R = np.linalg.solve(np.eye(n) - K, np.eye(n) + K)
    eps = torch.finfo(dtype).eps
    P = orthostochastic(A)
    torch.testing.assert_close(P, torch.from_numpy(R**2).to(dtype), rtol=0, atol=20 * eps)
    assert off(P) < 20 * eps


def test_entries_20_apart_are_scaled_right() -> None:
    M = torch.tensor([[0.0, 3.0], [-70.0, 1.0]], dtype=torch.float64)
    a = torch.sigmoid((M[0, 0] + M[1, 1] - M[0, 1] - M[1, 0]) / 2)  # of two rows there is a formula
    torch.testing.assert_close(sinkhorn(M), torch.stack([a, 1 - a, 1 - a, a]).view(2, 2), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("n", [4, 17])
def test_gradients_are_differences(map: Any, n: int) -> None:
    M = torch.randn(2, n, n, dtype=torch.float64, requires_grad=True)
    assert gradcheck(map, M, fast_mode=n > 4)
    assert gradgradcheck(map, M, fast_mode=n > 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("map", MAPS)
def test_16_bits_are_computed_in_float32(map: Any, dtype: torch.dtype) -> None:
    M = torch.randn(3, 4, 4).to(dtype)
    assert torch.equal(map(M), map(M.float()).to(dtype))


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("n", [4, 17])
def test_nan_stays_in_its_matrix(map: Any, n: int) -> None:
    M = torch.randn(3, n, n)
    expected = map(M)
    M[1, 0, 0] = torch.nan
    M[1, 0, 1] = torch.nan
    P = map(M)
    torch.testing.assert_close(P[::2], expected[::2])
    assert P[1].isnan().all()


@pytest.mark.parametrize("map", MAPS)
def test_wrong_input_is_refused(map: Any) -> None:
    for wrong in (torch.randn(3, 4), torch.randn(4), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expected a"):
            map(wrong)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinite_entries_are_refused(value: float) -> None:
    M = torch.zeros(2, 3, 3)
    M[1, 0, 2] = value
    with pytest.raises(ValueError, match="infinite"):
        sinkhorn(M)


@pytest.mark.parametrize("map", MAPS)
def test_vmap_is_a_loop(map: Any) -> None:
    M, C = torch.randn(3, 4, 5, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    loop = [M[:, :, i] for i in range(5)]
    torch.testing.assert_close(vmap(map, in_dims=2)(M), torch.stack([map(one) for one in loop]))
    gradient = grad(lambda X: (map(X) * C).sum())
    torch.testing.assert_close(vmap(gradient, in_dims=2)(M), torch.stack([gradient(one) for one in loop]))


@pytest.mark.parametrize("map", MAPS)
def test_tensors_without_data_have_the_shape(map: Any) -> None:
    assert map(torch.empty(3, 4, 4, device="meta", dtype=torch.bfloat16)).shape == (3, 4, 4)
    with FakeTensorMode():
        M = torch.empty(3, 4, 4, requires_grad=True)
        map(M).sum().backward()
        assert M.grad is not None and M.grad.shape == (3, 4, 4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("n", [4, 17])
def test_compiled_and_exported_equal_eager(map: Any, n: int) -> None:
    torch._dynamo.reset()
    M, G = torch.randn(3, n, n).mT.requires_grad_(), torch.randn(3, n, n)
    found, expected = torch.compile(map, fullgraph=True, backend="aot_eager")(M), map(M)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, M, G), torch.autograd.grad(expected, M, G))

    class Module(torch.nn.Module):
        def forward(self, M: Tensor) -> Tensor:
            return map(M)

    exported = torch.export.export(Module(), (M.detach(),)).module()
    torch.testing.assert_close(exported(M.detach()), expected.detach())
