"""The kernels of POET layers by Triton's interpreter, on a CPU, and the layers that use them."""

from typing import Any

import pytest
import torch
from compiling import as_if_compiled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import manifold_tying as mt
from manifold_tying import kernels, linalg
from manifold_tying.poet import RotationSpec, cached_weights, columns, linear

pytest.importorskip("triton")
from manifold_tying.poet.compiled import compiled_linear

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU: test_cuda.py"
)
# What rotates: both sides in equal blocks, in blocks with a smaller last one, one side, a part, blocks of two sizes.
LAYERS: dict[str, dict[str, Any]] = {
    "equal": {"block_size": 8, "terms": 2},
    "ragged": {"block_size": 9, "terms": 2},
    "inputs": {"block_size": 8, "terms": 2, "sides": "in"},
    "outputs": {"block_size": 8, "terms": 2, "sides": "out"},
    "full": {"scheme": "full", "fraction": 0.5, "terms": 2},
    "two sizes": {"block_size": 8, "terms": 2, "out_share": 0.7},
    "four terms": {"block_size": 8, "terms": 4},
    "exact": {"block_size": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "n"), [(1, 1), (5, 7), (64, 64), (70, 130)])
def test_transposes_with_a_permutation(dtype: torch.dtype, T: int, n: int) -> None:
    x, place = torch.randn(T, n).to(dtype), torch.randperm(n)
    v = kernels.to_columns(x, place)
    assert v.shape[1] % 8 == 0
    assert torch.equal(v[place, :T], x.mT) and not v[:, T:].any()
    assert torch.equal(kernels.from_columns(v, place, T), x)
    assert torch.equal(kernels.to_columns(x, place[:0])[:, :T], x.mT)


@pytest.mark.parametrize("low", [torch.float32, torch.float16])
@pytest.mark.parametrize(("k", "b"), [(2, 2), (2, 5), (3, 32), (1, 70)])
def test_blocks_and_their_gradient(low: torch.dtype, k: int, b: int) -> None:
    vectors = 0.1 * torch.randn(k, b * (b - 1) // 2) / b**0.5
    leaf, eye = vectors.double().requires_grad_(), torch.eye(b, dtype=torch.float64)
    A = linalg.skew(leaf, b)
    expected = (eye + A) @ (eye + A + A @ A)
    weights = torch.randn(k, b, b)
    (gradient,) = torch.autograd.grad((expected * weights.double()).sum(), leaf)
    tolerance = 1e-6 if low == torch.float32 else 1e-3
    blocks, skews = kernels.cubic_blocks(vectors, b, torch.float32, low)
    torch.testing.assert_close(blocks.double(), expected.detach(), rtol=0, atol=0.1 * tolerance)
    found = kernels.cubic_gradient(skews, weights)
    torch.testing.assert_close(found.double(), gradient, rtol=tolerance, atol=tolerance)


def outcome(layer: Any, forward: Any, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = forward(x)
    stored = layer.parametrizations.weight.original
    return [y.detach(), *torch.autograd.grad(y, (x, stored), cotangent.to(y.dtype))]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take the path that is for GPUs, here as well."""
    monkeypatch.setattr("manifold_tying.poet.parametrization.uses_triton", lambda *_: True)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_product_with_its_weight(name: str) -> None:
    layer: Any = mt.equivalence(nn.Linear(40, 24), seed=1, **LAYERS[name])
    with torch.no_grad():
        layer.parametrizations.weight.original.normal_(0, 0.03)
    x, cotangent = torch.randn(2, 13, 40), torch.randn(2, 13, 24)
    # The weight itself is formed without the kernels.
    expected = outcome(layer, lambda x: nn.functional.linear(x, layer.weight, layer.bias), x, cotangent)
    for found, own in zip(outcome(layer, layer, x, cotangent), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["ragged", "inputs", "full", "two sizes"])
def test_so_it_is_by_the_operation_of_compiled_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But "equal", whose blocks share memory: eager code takes no such results of an operation."""
    monkeypatch.setattr(linear, "by_activations", lambda *arguments: compiled_linear(*arguments[:-1]))
    test_a_layer_is_the_product_with_its_weight(name)


def test_compiled_code_on_a_gpu_has_kernels_for_two_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_compiled(monkeypatch)
    with FakeTensorMode():
        x = torch.empty(3, 8, device="cuda")

    def uses(terms: int | None, skew_params: Tensor) -> bool:
        return columns.uses_triton(x, skew_params, RotationSpec.of(8, 8, "block", 4, None, None, terms=terms))

    vector = torch.zeros(24)
    assert uses(2, vector) and not uses(4, vector) and not uses(2, vector.double())
    assert not torch.func.vmap(lambda v: v + uses(2, v))(vector[None]).any()  # a transform needs the plain form


@pytest.mark.usefixtures("on_gpu")
def test_low_precision_rounds_activations_only() -> None:
    layer: Any = mt.equivalence(nn.Linear(40, 24), seed=1, block_size=8, terms=2)
    with torch.no_grad():
        layer.parametrizations.weight.original.normal_(0, 0.03)
    x, cotangent = torch.randn(13, 40), torch.randn(13, 24)
    expected = outcome(layer, layer, x, cotangent)
    with torch.autocast("cpu", torch.float16):
        found = outcome(layer, layer, x, cotangent)
    assert found[0].dtype == torch.float16
    for own, full in zip(found, expected, strict=True):
        assert torch.dist(own.float(), full) < 2e-3 * full.norm()


@pytest.mark.parametrize("name", ["equal", "ragged", "inputs", "two sizes", "four terms"])
def test_weights_computed_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(*(mt.equivalence(nn.Linear(24, 24), seed=seed, **LAYERS[name]) for seed in (1, 2)))
    stored = [p for key, p in layers.named_parameters() if "original" in key]
    with torch.no_grad():
        for vector in stored:
            vector.normal_(0, 0.03)
    x, cotangent, found = torch.randn(13, 24), torch.randn(13, 24), []
    # The interpreter knows no products of bfloat16.
    monkeypatch.setattr("manifold_tying.poet.cached.matmul_dtype", lambda _: torch.float16)
    for by_kernels in (False, True):
        monkeypatch.setattr(kernels, "runs_triton", lambda _, given=by_kernels: given)
        with torch.autocast("cpu", torch.float16), cached_weights(layers):
            y = layers(x)
        found.append([y.detach(), *torch.autograd.grad(y, stored, cotangent.to(y.dtype))])
    for expected, own in zip(*found, strict=True):
        assert torch.dist(own.float(), expected.float()) <= 3e-3 * expected.float().norm()
