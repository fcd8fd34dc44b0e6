"""Spheres of rows, columns and matrices against geoopt's and against closed formulas, and layers that keep their norms."""

import copy
import math
from typing import Any, cast

import geoopt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import assert_one_graph, stored
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying import Sphere
from manifold_tying.optim import RiemannianAdam, RiemannianMuon, RiemannianSGD, param_groups
from manifold_tying.testing import points, tangent_vectors

KINDS = ("rows", "columns", "matrix")
each_kind = pytest.mark.parametrize("of", KINDS)
SHAPES = st.sampled_from([(4, 3), (2, 3, 5, 2)])
R = 2.5


def vectors(x: Tensor, of: str) -> Tensor:
    """The rows, columns or matrices as the last dimension."""
    return {"rows": x, "columns": x.mT, "matrix": x.flatten(-2)}[of]


def norms(x: Tensor, of: str) -> Tensor:
    return torch.linalg.vector_norm(vectors(x.detach(), of), dim=-1)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_long_columns_are_summed_exactly() -> None:
    x, u = torch.randn(2, 2, 1100, 3, dtype=torch.float64)
    x.requires_grad_()
    expected = u - x * (x * u).sum(-2, keepdim=True)
    close(Sphere("columns").proju(x, u), expected)
    close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (Sphere("columns").proju(x, u), expected)))


@each_kind
@given(st.data())
def test_the_unit_sphere_is_geoopts(of: Any, data: st.DataObject) -> None:
    ours, theirs = Sphere(of), geoopt.SphereExact()
    x = data.draw(points(ours, data.draw(SHAPES)))
    u = data.draw(tangent_vectors(ours, x, size=0.7))
    v = torch.randn(x.shape, dtype=x.dtype)
    y = ours.expmap(x, u)
    X, U, V, Y = (vectors(t, of) for t in (x, u, v, y))
    close(Y, theirs.expmap(X, U))
    arcs = 2 * ((X - Y).norm(dim=-1) / 2).asin()
    apart = arcs > 1e-2  # their acos loses the digits of smaller angles
    arcs = torch.where(apart, theirs.dist(X, Y), arcs)
    close(ours.dist(x, y), arcs if of == "matrix" else arcs.square().sum(-1).sqrt())
    close(vectors(ours.logmap(x, y), of), torch.where(apart[..., None], theirs.logmap(X, Y), U))
    close(vectors(ours.projx(v), of), theirs.projx(V))
    close(vectors(ours.proju(x, v), of), theirs.proju(X, V))
    close(vectors(ours.transp(x, y, u), of), theirs.proju(Y, U))
    close(vectors(ours.retr(x, u), of), geoopt.Sphere().retr(X, U))
    close(vectors(ours.component_inner(x, u, v), of), theirs.inner(X, U, V, keepdim=True))
    close(ours.inner(x, u, v), (u * v).sum((-2, -1)))


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 1.0, 3.0])
def test_angles_of_every_size_are_exact(angle: float) -> None:
    sphere = Sphere(radius=R)
    x, u = torch.zeros(2, 1, 3, dtype=torch.float64)
    x[:, 0], u[:, 1] = R, R * angle
    y = torch.tensor([[R * math.cos(angle), R * math.sin(angle), 0.0]], dtype=torch.float64)
    close(sphere.expmap(x, u), y, 1e-14)
    close(sphere.logmap(x, y), u, 1e-14)
    close(sphere.dist(x, y), torch.tensor(R * angle, dtype=torch.float64), 1e-14)
    x.requires_grad_()
    (sphere.dist(x, y) + sphere.logmap(x, y).sum() + sphere.expmap(x, u).sum()).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@each_kind
def test_random_origin_and_shapes(of: Any) -> None:
    sphere = Sphere(of, radius=R)
    for made in (sphere.random(2, 5, 3, dtype=torch.float64), sphere.origin(2, 5, 3, dtype=torch.float64)):
        assert isinstance(made, geoopt.ManifoldTensor) and made.dtype == torch.float64
        lengths = norms(made, of)
        close(lengths.as_subclass(Tensor), torch.full_like(lengths, R).as_subclass(Tensor), 1e-14)
    assert (sphere.origin(5, 3) != 0).sum() == {"rows": 5, "columns": 3, "matrix": 1}[of]
    assert not sphere.check_point(torch.zeros(3))
    assert not sphere.check_point(torch.zeros(1, 1))


def test_norms_do_not_overflow() -> None:
    x = torch.full((2, 3), 1e30)
    close(norms(Sphere("matrix").projx(x), "matrix"), torch.tensor(1.0), 1e-6)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: Sphere("row"), "unknown of='row'; choose one of rows, columns, matrix"),  # type: ignore[arg-type]
        (lambda: Sphere(radius=0.0), "a float from 1e-15 to 1e15 or a tensor of them, got 0.0"),
        (lambda: Sphere(radius=cast(Any, [1.0])), r"a float from 1e-15 to 1e15 or a tensor of them, got \[1.0\]"),
        (lambda: Sphere(radius=torch.tensor([1.0, math.inf])), "a float from 1e-15 to 1e15"),
        (lambda: Sphere(radius=torch.ones(3, 1)).random(4, 2), r"norms of shape \(4, 1\), but radius \(3, 1\)"),
        (lambda: mt.sphere(nn.Embedding(5, 3, padding_idx=0)), "rows of Embedding.weight .* but 1 of 5 are zero"),
        (
            lambda: mt.sphere(nn.Linear(3, 5), radius=torch.ones(4, 1)),
            r"Linear.weight of shape \(5, 3\) to hold points",
        ),
        (lambda: mt.sphere(nn.Linear(1, 5)), "rows of one entry, which cannot move"),
    ],
)
def test_wrong_values(make: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "convolution": lambda: nn.Conv2d(2, 4, 3),
    "half": lambda: nn.Linear(6, 4).half(),
}


@pytest.mark.parametrize("optimizer", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("kind", LAYERS)
@each_kind
def test_training_keeps_the_norms_of_the_weight(of: Any, kind: str, optimizer: Any) -> None:
    layer: Any = LAYERS[kind]()
    before = layer.weight.detach().float().flatten(1)
    mt.sphere(layer, of=of)
    close(layer.weight.detach().float().flatten(1), before, 1e-6)
    trained = optimizer(layer.parameters(), lr=0.1)
    target = torch.randn(layer.weight.shape)
    losses = []
    for _ in range(50):
        trained.zero_grad()
        loss = (layer.weight.float() - target).square().mean()
        loss.backward()
        trained.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    close(norms(stored(layer).reshape(4, -1), of), norms(before, of), 1e-6)
    layer.weight = target  # projects to the same norms
    close(norms(stored(layer), of), norms(before, of), 1e-6)


def test_a_state_brings_its_norms() -> None:
    source, target = mt.sphere(nn.Linear(6, 4)), mt.sphere(nn.Linear(6, 4))
    state = source.state_dict()
    assert state["parametrizations.weight.0.manifold.radius"].shape == (4, 1)
    target.load_state_dict(state)
    target.weight = torch.randn(4, 6)
    close(norms(target.weight, "rows"), norms(source.weight, "rows"), 1e-6)
    for other in (mt.sphere(nn.Linear(6, 4), of="columns"), mt.sphere(nn.Linear(6, 4), radius=1.0)):
        with pytest.raises(
            RuntimeError, match=r"expected the state of constrain\(Sphere\(of='(columns|rows)', radius=.*its form is"
        ):
            other.load_state_dict(state)


def test_norms_are_unknown_on_the_meta_device_until_a_state_is_loaded() -> None:
    with torch.device("meta"):
        layer, known = mt.sphere(nn.Linear(6, 4)), mt.sphere(nn.Linear(6, 4), radius=2.0)
    layer.to_empty(device="cpu")
    assert layer.state_dict()["parametrizations.weight.0.manifold.radius"].isnan().all()
    with pytest.raises(ValueError, match="to know its radius, got NaN"):
        layer.reset_parameters()
    source = mt.sphere(nn.Linear(6, 4))
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.weight, source.weight)
    known.to_empty(device="cpu").reset_parameters()
    close(norms(known.weight, "rows"), torch.full((4,), 2.0), 1e-6)


@pytest.mark.parametrize("optimizer", [RiemannianAdam, RiemannianSGD, RiemannianMuon])
@pytest.mark.parametrize("size", [6, 200])  # moved as one stack, and one after the other
def test_layers_with_their_own_norms_are_one_group_and_move_as_if_alone(
    optimizer: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(mt.sphere(nn.Linear(size, size, bias=False)) for _ in range(3)))
    alone = copy.deepcopy(model)
    groups = param_groups(model)
    assert len(groups) == 1 and len(groups[0]["params"]) == 3
    together = optimizer(groups, lr=0.1)
    apart = [optimizer(layer.parameters(), lr=0.1) for layer in alone]
    calls = []
    step = optimizer._step_points

    def counted(*args: Any) -> None:
        calls.append(1)
        step(*args)

    monkeypatch.setattr(optimizer, "_step_points", counted)
    x = torch.randn(8, size)
    for _ in range(3):
        for built, optimizers in ((model, [together]), (alone, apart)):
            built.zero_grad()
            built(x).square().mean().backward()
            for each in optimizers:
                each.step()
    assert len(calls) == 3 + 9
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(one.detach(), other.detach(), 1e-6)


@pytest.mark.parametrize("of", ["rows", "columns", "matrix"])
@pytest.mark.parametrize("size", [8, 120, 200])  # moved as one stack, each alone, and by blocks of its rows
def test_a_step_is_adams_of_the_projected_gradient_then_normalized(of: Any, size: int) -> None:
    torch.manual_seed(0)
    layers: list[Any] = [mt.sphere(nn.Linear(size, 4 * size, bias=False, dtype=torch.float64), of=of) for _ in range(2)]
    shadows = [nn.Parameter(layer.weight.detach().clone()) for layer in layers]
    dims = {"rows": (-1,), "columns": (-2,), "matrix": (-2, -1)}[of]
    lengths = [X.detach().norm(dim=dims, keepdim=True) for X in shadows]
    ours = RiemannianAdam([p for layer in layers for p in layer.parameters()], lr=0.05)
    theirs = torch.optim.Adam(shadows, lr=0.05)
    for _ in range(4):
        for layer, X, radius in zip(layers, shadows, lengths, strict=True):
            (stored,) = layer.parameters()
            stored.grad = torch.randn_like(stored)
            G = stored.grad
            X.grad = G - X.detach() * (X.detach() * G).sum(dims, keepdim=True) / radius**2
        ours.step()
        theirs.step()
        for layer, X, radius in zip(layers, shadows, lengths, strict=True):
            X.data.mul_(radius / X.data.norm(dim=dims, keepdim=True))
            close(layer.weight.detach(), X.detach(), 1e-13)


def test_layer_and_step_compile() -> None:
    layer = mt.sphere(nn.Linear(6, 4, bias=False, dtype=torch.float64))
    optimizer = RiemannianAdam(layer.parameters(), lr=torch.tensor(0.1))
    assert_one_graph(layer, torch.randn(3, 6, dtype=torch.float64))
    other = copy.deepcopy(layer)
    plain = RiemannianAdam(other.parameters(), lr=torch.tensor(0.1))
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(3):
        for built, step in ((layer, compiled), (other, plain.step)):
            built.zero_grad()
            built(x).square().mean().backward()
            step()
    close(layer.weight.detach(), other.weight.detach(), 1e-12)


@pytest.mark.parametrize("optimizer", [RiemannianAdam, RiemannianSGD, RiemannianMuon])
def test_a_row_pruned_by_data_without_a_gradient_stays_zero(optimizer: Any) -> None:
    layer = mt.sphere(nn.Linear(8, 6))
    steps = optimizer(layer.parameters(), lr=0.1)
    layer.weight.data[0] = 0  # which no version counter sees
    with torch.no_grad():
        layer.bias[0] = -1
    layer(torch.randn(4, 8)).relu().square().sum().backward()
    steps.step()
    assert not layer.weight[0].any()
    layer.weight.sum().backward()
    steps.step()
    assert layer.weight[0].norm() > 0.1
