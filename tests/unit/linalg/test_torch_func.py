"""torch.func transforms are right: grad, vmap, jvp, and all that is made of them."""

import copy
from typing import Any

import pytest
import torch
from derivatives import DOUBLE, FUNCTIONS, MODELS, Case, curvature, gradient, relative_error
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from manifold_tying import linalg, orthogonal

HESSIANS = {
    "hessian": hessian,
    "forward over reverse": lambda f: jacfwd(grad(f)),
    "reverse over reverse": lambda f: jacrev(grad(f)),
    "reverse over forward": lambda f: jacrev(jacfwd(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessians_by_every_combination(name: str) -> None:
    f, x = FUNCTIONS[name]
    directions = torch.randn(2, *x.shape, dtype=DOUBLE)
    expected = torch.stack([curvature(f, x, v) for v in directions])
    for kind, transform in HESSIANS.items():
        H = transform(f)(x).reshape(x.numel(), x.numel())
        found = (directions.flatten(1) @ H).view_as(directions)
        assert relative_error(found, expected) < 1e-7, kind


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_of_a_batch_is_as_alone(name: str) -> None:
    f, x = FUNCTIONS[name]
    batch = torch.stack([x, 1.1 * x, -0.9 * x])
    torch.testing.assert_close(vmap(f)(batch), torch.stack([f(y) for y in batch]))
    torch.testing.assert_close(vmap(grad(f))(batch), torch.stack([gradient(f, y) for y in batch]))
    twice = batch.expand(2, *batch.shape).movedim(0, -1)  # a batch dimension at the end, over one at the front
    torch.testing.assert_close(vmap(vmap(f), in_dims=-1)(twice)[1], vmap(f)(batch))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_tangents_of_models(name: str) -> None:
    case = Case(name)
    expected = gradient(case, case.start)
    torch.testing.assert_close(grad(case)(case.start), expected, rtol=1e-9, atol=1e-12)
    value, pull, *_ = vjp(case, case.start)
    torch.testing.assert_close(pull(torch.ones_like(value))[0], expected, rtol=1e-9, atol=1e-12)
    along = expected @ case.direction
    torch.testing.assert_close(jvp(case, (case.start,), (case.direction,))[1], along)
    with forward_ad.dual_level():
        dual = case(forward_ad.make_dual(case.start, case.direction))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)
    torch.testing.assert_close(value, case(case.start))


@pytest.mark.parametrize("name", MODELS)
def test_batched_gradients_of_models(name: str) -> None:
    case, weights = Case(name), torch.tensor([1.0, -2.0], dtype=DOUBLE)
    start, expected = case.start.clone().requires_grad_(), gradient(case, case.start)
    value = case(start)
    (found,) = torch.autograd.grad(value, start, weights.to(value.dtype), is_grads_batched=True)
    torch.testing.assert_close(found, weights[:, None] * expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_curvature_of_models(name: str) -> None:
    case = Case(name)
    expected, v = curvature(case, case.start, case.direction), case.direction
    assert relative_error(jvp(grad(case), (case.start,), (v,))[1], expected) < 1e-6
    assert relative_error(grad(lambda x: grad(case)(x) @ v)(case.start), expected) < 1e-6
    twice = jvp(lambda x: jvp(case, (x,), (v,))[1], (case.start,), (v,))[1]
    assert abs(twice - expected @ v) < 1e-6 * expected.norm() * v.norm()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample(name: str) -> None:
    case = Case(name)
    found = vmap(grad(case), in_dims=(None, 0))(case.start, case.inputs)
    expected = torch.stack([gradient(lambda p, x=x: case(p, x), case.start) for x in case.inputs])  # type: ignore[misc]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert relative_error(found.mean(0).expand_as(found), expected) > 1e-3  # negative control: samples differ


@pytest.mark.parametrize("name", MODELS)
def test_an_ensemble_is_its_members(name: str) -> None:
    case = Case(name)
    members = [copy.deepcopy(case.model) for _ in range(3)]
    with torch.no_grad():
        for p in (p for member in members for p in member.parameters() if p.requires_grad):
            p.add_(0.1 * torch.randn_like(p))
    parameters, buffers = stack_module_state(members)
    x: Any = case.inputs[0]
    found = vmap(lambda p, b: functional_call(case.model, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]))


def test_an_ensemble_of_other_places() -> None:
    case = Case("equivalence, weight-centric")
    members = [copy.deepcopy(case.model) for _ in range(2)]
    order = torch.randperm(9)
    for key, buffer in members[1].named_buffers():
        if key.endswith("out_places"):
            assert not torch.equal(buffer, order)
            buffer.copy_(order)
    for p in (p for member in members for p in member.parameters()):
        p.data.add_(0.1 * torch.randn_like(p))
    x = case.inputs[0]
    found = vmap(lambda p, b: functional_call(case.model, (p, b), (x,)))(*stack_module_state(members))
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]))


def test_a_rank_deficient_matrix_has_finite_derivatives() -> None:
    Y = torch.randn(6, 3, dtype=DOUBLE)
    Y[:, 2] = Y[:, 1]
    assert grad(lambda Y: linalg.polar(Y)[1].square().sum())(Y).isfinite().all()


@pytest.mark.parametrize("map", ["qr", "cayley-neumann"])
def test_compiled_transforms(map: Any) -> None:
    torch._dynamo.reset()
    layer = orthogonal(nn.Linear(4, 6).double(), map=map)
    parameters = {key: p.detach() + 0.1 for key, p in layer.named_parameters()}
    x = torch.randn(3, 2, 4, dtype=DOUBLE)
    samples = vmap(grad(lambda p, x: functional_call(layer, p, (x,)).pow(3).sum()), in_dims=(None, 0))
    compiled = torch.compile(samples, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(parameters, x), samples(parameters, x))
