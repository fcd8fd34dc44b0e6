"""Split products as a CUDA device computes them, and the interfaces that use them, against float64."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from manifold_tying import PIT, kernels
from manifold_tying.tying import PITEmbedding


def add_exactly(total: Tensor, A: Tensor, B: Tensor, beta: float = 1.0) -> Tensor:
    """What the device does: 16-bit factors, float32 sums."""
    assert A.dtype == B.dtype == torch.bfloat16 and total.dtype == torch.float32
    return total.copy_(A.float() @ B.float() + (total if beta else 0))


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts them, of any size."""
    for name in ("SMALL", "LARGE_GRAM"):
        monkeypatch.setattr(f"manifold_tying.kernels._products.{name}", 0)
    counted = Mock(side_effect=add_exactly)
    monkeypatch.setattr("manifold_tying.kernels._products.add_product_", counted)
    monkeypatch.setattr("manifold_tying.kernels._products.runs_eagerly_on_gpu", lambda x: True)
    return counted


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("parts", "bound"), [(2, 2e-5), (3, 3e-7)])
def test_a_split_product_is_as_exact_as_its_parts(dtype: torch.dtype, parts: int, bound: float) -> None:
    A, B = torch.randn(200, 300, dtype=torch.float64).to(dtype), torch.randn(300, 100)
    exact = A.double() @ B.double()
    assert error(kernels.split_product(A, B, parts), exact) <= bound
    assert error(kernels.split_product(A.mT.contiguous().mT, B, 1), exact) > 1e-3  # negative control


@pytest.mark.parametrize(
    ("V", "dtype"), [(1, torch.float32), (30, torch.float16), (128, torch.bfloat16), (150, torch.float32)]
)
def test_a_gram_matrix_of_columns_of_any_size(V: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far closer than a float32 product, with rows that have much in common."""
    monkeypatch.setattr("manifold_tying.kernels._products.ROWS", 64)
    W = ((torch.randn(V, 9) + torch.linspace(0, 3, 9)) * torch.logspace(-3, 3, 9)).to(dtype)
    W[:, 4] = 0
    exact = W.double().mT @ W.double()
    scale = torch.outer(exact.diagonal(), exact.diagonal()).sqrt()
    assert ((kernels.split_gram(W) - exact).abs() <= 3e-8 * scale).all()
    if V > 1 and dtype == torch.float32:
        product = kernels.split_product(W.mT, W, 3)
        assert ((product - exact).abs() > 5e-8 * scale).any()  # negative control


def towards_zero(total: Tensor, A: Tensor, B: Tensor, beta: float = 1.0) -> Tensor:
    """As tensor cores do: each sum of 16 products is added, and rounded to 24 bits towards 0."""
    found = total.double() * beta if beta else torch.zeros(total.shape, dtype=torch.float64)
    for a, b in zip(A.double().split(16, 1), B.double().split(16), strict=True):
        mantissa, exponent = (found + a @ b).frexp()
        found = torch.ldexp((mantissa * 2**24).trunc(), exponent - 24)
    return total.copy_(found)


@pytest.mark.parametrize(("mean", "width"), [(0.0, 1.0), (0.5, 0.5), (7.0, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gram_matrix_by_sums_that_are_rounded_down(
    mean: float, width: float, dtype: torch.dtype, products: Mock
) -> None:
    """Of many entries that are near the largest of their column."""
    products.side_effect = towards_zero
    W = (mean + width * (2 * torch.rand(9000, 4) - 1)).to(dtype)
    exact = W.double().mT @ W.double()
    assert torch.dist(kernels.split_gram(W), exact) <= 1.5e-8 * exact.trace()


def table(cond: float) -> Tensor:
    """(400, 32), of this condition number."""
    U, Q = (torch.linalg.qr(torch.randn(n, 32, dtype=torch.float64))[0] for n in (400, 32))
    return U * torch.logspace(0, -torch.tensor(cond).log10(), 32, dtype=torch.float64) @ Q.mT


@pytest.mark.parametrize("memory", ["free", "frozen", "trainable"])
@pytest.mark.parametrize("cond", [3.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interfaces_under_autocast(memory: Any, cond: float, dtype: torch.dtype, products: Mock) -> None:
    """E, the readout and all gradients, far closer to float64 than bfloat16 is, unless they are bfloat16."""
    pit = PIT.from_embedding(table(cond).float(), transform="head", memory=memory)
    exact = copy.deepcopy(pit).double()
    ids, hidden = torch.randperm(400)[:90], torch.randn(50, 32).to(dtype)
    weights = torch.randn(90, 32).bfloat16()  # gradients that arrive are rounded to it
    results: list[list[Tensor]] = []
    for own, h in ((pit, hidden), (exact, hidden.double())):
        h = h.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            e, (readout, _) = own.embed(ids), own._factors(h)
        leaves = [p for p in own.parameters() if p.requires_grad]
        gradients = torch.autograd.grad((e * weights.to(e.dtype)).sum(), leaves, allow_unused=True)
        if readout is not h:
            gradients += torch.autograd.grad((readout.to(e.dtype) * weights[:50].to(e.dtype)).sum(), [h, *leaves[-1:]])
        results.append([e.detach(), readout.detach(), *(g for g in gradients if g is not None)])
    errors = torch.tensor([error(*pair) for pair in zip(*results, strict=True)])
    assert products.call_count >= 6
    narrow = torch.tensor([a.dtype == torch.bfloat16 for a in results[0]])
    assert (errors <= torch.where(narrow, 4e-3, 1e-4)).all()
    with torch.autocast("cpu", torch.bfloat16):  # a transform takes the plain form
        readout = torch.func.vmap(lambda h: pit._factors(h)[0])(hidden[None])[0]
    assert error(readout, results[1][1]) <= (4e-3 if dtype == torch.bfloat16 else 1e-4)


def test_the_head_stays_the_inverse_of_a_free_embedding() -> None:
    """cond(W) times as far as 16 bits of W alone move it, and not cond(W)² times."""
    embedding = PITEmbedding(400, 32)
    embedding.weight.data.copy_(table(300.0))
    W = embedding.weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        E = embedding(torch.arange(400)).detach().double()
    defect, rounded = ((M.double().mT @ E - torch.eye(32)).norm() for M in (W, W.bfloat16()))
    assert 1e-6 < defect < 0.01 * rounded


def test_exact_and_split_lookups_of_one_table_alternate() -> None:
    embedding = PITEmbedding(400, 32)
    embedding.weight.data.copy_(table(300.0))
    for split in (True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=split):
            E = embedding(torch.arange(400)).detach().double()
        defect = (embedding.weight.detach().double().mT @ E - torch.eye(32)).norm() / 32**0.5
        assert (defect > 6e-8 * 300.0) == split


def test_float32_is_not_split() -> None:
    x = torch.zeros(2)
    assert kernels.splits(x, torch.float32, torch.bfloat16) and not kernels.splits(x, torch.float32, torch.float64)
