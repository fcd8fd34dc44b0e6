"""Weights of POET's layers that are computed together are those that each layer computes."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.poet import cached_weights, equivalences


def model(terms: int | None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of three shapes, with and without bias, two of them with blocks that leave a smaller last one."""
    shapes = [(24, 24), (24, 24), (24, 40), (40, 24), (24, 24)]
    layers = nn.Sequential(*(nn.Linear(*shape, bias=i % 2 == 0) for i, shape in enumerate(shapes))).to(dtype)
    mt.equivalence_(layers, block_size=18, terms=terms, seed=3, exclude=(), verbose=False)
    with torch.no_grad():
        for _, _, stored in equivalences(layers):
            stored.normal_(0, 0.02)
    return layers


def result(layers: nn.Module, run: Callable[[Tensor], Tensor], together: bool) -> list[Tensor]:
    layers.zero_grad()
    x = torch.ones(5, 24, dtype=next(p for name, p in layers.named_parameters() if "bias" in name).dtype)
    with cached_weights(layers) if together else contextlib.nullcontext():
        y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in layers.parameters() if p.grad is not None)]


# Every pair of a number of terms, a dtype and autocast.
@pytest.mark.parametrize(
    ("terms", "dtype", "autocast"),
    [
        (terms, dtype, (i + j) % 2 == 1)
        for i, terms in enumerate((2, 4, None))
        for j, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16))
    ],
)
def test_output_and_gradients(terms: int | None, dtype: torch.dtype, autocast: bool) -> None:
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    layers = model(terms, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = (result(layers, layers, together) for together in (False, True))
    assert len(expected) == 1 + len(list(layers.parameters()))
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= (0.03 if autocast else bound) * a.double().norm()


def test_the_weights_last_until_the_exit() -> None:
    layers, x = model(2), torch.ones(3, 24)
    before = layers(x)
    with cached_weights(layers):
        for _, _, stored in equivalences(layers):
            stored.data.zero_()  # which no version counter sees
        assert torch.allclose(layers(x), before, atol=1e-5)  # of the vectors at the entry
    assert not torch.allclose(layers(x), before, atol=1e-2)
    with pytest.raises(RuntimeError, match="stop"), cached_weights(layers):
        raise RuntimeError("stop")
    assert all(part.cached is None for _, part, _ in equivalences(layers))


@pytest.mark.parametrize("change", ["step", "merge", "assign"])
def test_what_has_changed_since_the_entry_is_computed_again(change: str) -> None:
    layers: Any = model(2)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    result(layers, layers, False)
    with cached_weights(layers):
        if change == "step":
            optimizer.step()
        elif change == "merge":
            mt.merge(layers)
        else:
            layers[0].weight = torch.eye(24)
        inside = result(layers, layers, False)
    for a, b in zip(inside, result(layers, layers, False), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_copy_that_changes_is_computed_again() -> None:
    layers, x = model(2), torch.ones(3, 24)
    with cached_weights(layers):
        copied = copy.deepcopy(layers)
    for changed in (copied, layers):
        for _, _, stored in equivalences(changed):
            stored.zero_()
    assert torch.allclose(copied(x), layers(x), atol=1e-5)


def test_gradients_need_weights_that_have_them() -> None:
    """Weights that were computed without gradients serve only where none are needed."""
    layers, x = model(2), torch.ones(3, 24)
    expected = result(layers, layers, False)
    with contextlib.ExitStack() as stack:
        with torch.no_grad():
            stack.enter_context(cached_weights(layers))
        found = result(layers, layers, False)
        with torch.no_grad():
            for _, _, vector in equivalences(layers):
                vector.data.zero_()  # which no version counter sees
            assert torch.allclose(layers(x), expected[0][:3], atol=1e-5)
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_other_vectors_have_other_weights() -> None:
    layers, x = model(2), torch.ones(3, 24)
    others = {name: p.detach() + 0.01 for name, p in layers.named_parameters()}
    for (name, p), other in zip(layers.named_parameters(), others.values(), strict=True):
        while other._version < p._version:  # no difference in how often they were written
            other.mul_(1)
        assert other._version == p._version, name

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers, tensors, (x,)).square().sum()

    expected, gradients = loss(others), torch.func.grad(loss)(others)
    with cached_weights(layers):
        assert torch.equal(loss(others), expected)
        found = torch.func.grad(loss)(others)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


def test_a_bfloat16_model_under_float16_autocast() -> None:
    layers, x = model(2, torch.bfloat16), torch.ones(3, 24)
    with torch.autocast("cpu", torch.float16):
        expected = layers(x)
        with cached_weights(layers):
            torch.testing.assert_close(layers(x), expected, rtol=0.02, atol=0.02)


def test_other_layers_are_left_out() -> None:
    kernel = mt.equivalence(nn.Conv1d(16, 16, 3))
    others = mt.stiefel(nn.Linear(16, 16)), mt.low_rank(nn.Linear(16, 16), rank=2)
    layers = nn.ModuleList([mt.equivalence(nn.Linear(16, 16)), kernel, *others])
    with cached_weights(layers):
        assert [part.cached is not None for _, part, _ in equivalences(layers)] == [True, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, but not from pytest
def test_compiled_code_takes_the_weights_as_inputs() -> None:
    layers = model(None)
    expected, counted = result(layers, layers, True), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, backend=counted, fullgraph=True)
    for _ in range(3):
        found = result(layers, compiled, True)
        with torch.no_grad():  # new weights need no new code
            for _, _, stored in equivalences(layers):
                stored.mul_(1.0)
    assert counted.frame_count == 1 and counted.op_count < 20
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
