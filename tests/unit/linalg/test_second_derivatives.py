"""Second derivatives are right, or refused, and third ones where they are promised."""

from collections.abc import Callable

import pytest
import torch
from derivatives import DOUBLE, FUNCTIONS, MODELS, Case, curvature, gradient, relative_error
from torch import Tensor, nn
from torch.func import grad

from manifold_tying import PIT, TransposeTying, equivalence, linalg, orthogonal


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_hessian_is_that_of_differences(name: str) -> None:
    f, x = FUNCTIONS[name]
    columns = [curvature(f, x, e.view_as(x)).flatten() for e in torch.eye(x.numel(), dtype=DOUBLE)]
    found = torch.autograd.functional.hessian(f, x)
    assert isinstance(found, Tensor)
    assert relative_error(found.reshape(x.numel(), -1), torch.stack(columns)) < 1e-7


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_the_backward_changes_no_gradient_and_has_the_curvature_of_differences(name: str) -> None:
    case = Case(name)
    expected, curved = gradient(case, case.start), curvature(case, case.start, case.direction)
    x = case.start.requires_grad_()
    loss = case(x)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert relative_error(first.detach(), expected) < 1e-12
    (found,) = torch.autograd.grad(first @ case.direction, x, retain_graph=True)
    assert relative_error(found, curved) < 1e-6
    assert relative_error(torch.zeros_like(found), curved) > 0.5  # negative control: there is curvature to lose
    (again,) = torch.autograd.grad(loss, x)
    assert relative_error(again, expected) < 1e-12


def test_a_constant_and_a_trained_gradient_that_comes_in() -> None:
    # The second derivative by an incoming gradient alone, and by what the forward saved alone, are different routes.
    for name, (f, x) in FUNCTIONS.items():
        leaf, weight = x.clone().requires_grad_(), torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
        v = torch.randn_like(x)
        (first,) = torch.autograd.grad(weight * f(leaf), leaf, create_graph=True)
        by_weight, by_leaf = torch.autograd.grad((first * v).sum(), (weight, leaf))
        assert torch.isclose(by_weight, (gradient(f, x) * v).sum()), name
        assert relative_error(by_leaf, 2 * curvature(f, x, v)) < 1e-6, name


def test_an_argument_that_depends_on_another_counts_once() -> None:
    layer = equivalence(nn.Linear(6, 9).double(), block_size=4)
    stored = layer.parametrizations.weight.original  # type: ignore[union-attr]
    assert isinstance(stored, Tensor)

    def f(vector: Tensor) -> Tensor:
        x = vector[:12].view(2, 6)
        return (torch.func.functional_call(layer, {"parametrizations.weight.original": vector}, (x,)) ** 3).sum()

    start = 0.3 * torch.randn_like(stored)
    v = torch.randn_like(start)
    found = torch.autograd.functional.hvp(f, start, v)[1]
    assert isinstance(found, Tensor)
    assert relative_error(found, curvature(f, start, v)) < 1e-7


def test_by_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manifold_tying.linalg._polar._FEW_COLUMNS", 0)
    f, x = FUNCTIONS["polar, equal singular values"]
    v = torch.randn_like(x)
    found = torch.autograd.functional.hvp(f, x + 0.1 * v, v)[1]
    assert isinstance(found, Tensor)
    assert relative_error(found, curvature(f, x + 0.1 * v, v)) < 1e-7


def test_float32_and_autocast() -> None:
    Y, v = torch.randn(9, 6), torch.randn(9, 6)

    def f(Y: Tensor) -> Tensor:
        return (linalg.polar(Y)[0] ** 3).sum()

    leaf = Y.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (found,) = torch.autograd.grad(first, leaf, v)
    assert found.dtype == torch.float32
    assert relative_error(found.double(), curvature(f, Y.double(), v.double())) < 1e-4


def test_compiled_code_loses_none_of_what_eager_code_has() -> None:
    # torch refuses second derivatives of compiled graphs; a gradient that is not differentiated works with create_graph.
    torch._dynamo.reset()
    layer = orthogonal(nn.Linear(4, 6).double())
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(2, 4, dtype=DOUBLE)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), parameters)
    found = torch.autograd.grad(compiled(x).square().sum(), parameters, create_graph=True)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        sum(g.square().sum() for g in found).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("interface", [TransposeTying, PIT])
def test_the_loss_is_cut_off_from_nothing(interface: type) -> None:
    # A body alone, without a lookup: the curvature that the loss itself has in the hidden states.
    head = interface(40, 6).double()
    x, targets = torch.randn(15, 6, dtype=DOUBLE), torch.randint(40, (15,))
    W, v = torch.randn(6, 6, dtype=DOUBLE), torch.randn(6, 6, dtype=DOUBLE)

    def ours(W: Tensor) -> Tensor:
        return head.loss(x @ W, targets)

    def dense(W: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ W @ head.materialize()[1], targets)

    found, expected = (torch.autograd.functional.hvp(f, W, v)[1] for f in (ours, dense))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("f", [lambda W: linalg.spd_log(W @ W.mT), lambda W: linalg.polar(W)[0]], ids=["log", "polar"])
def test_third_derivatives_are_differences_of_second_ones(f: Callable[[Tensor], Tensor]) -> None:
    W, direction = (torch.randn(3, 3, dtype=torch.float64) for _ in range(2))

    def along(t: Tensor) -> Tensor:
        return f(2 * torch.eye(3) + (0.3 + t) * W + t * direction).pow(2).mul(torch.arange(9.0).view(3, 3)).sum()

    second, zero, h = grad(grad(along)), torch.zeros((), dtype=torch.float64), 1e-4
    expected = (second(zero + h) - second(zero - h)) / (2 * h)
    torch.testing.assert_close(grad(second)(zero), expected, rtol=1e-5, atol=1e-5)
