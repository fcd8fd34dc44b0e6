"""Any manifold on any layer: what is stored, saved, trained and refused."""

import copy
import pickle
from typing import Any

import geoopt
import pytest
import torch
from layers import Stack, stored
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups


class Unfinished(geoopt.Sphere):
    """Its projx forgets to normalize."""

    def projx(self, x: Tensor) -> Tensor:
        return x


def norms(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight.detach(), dim=-1)


@pytest.mark.parametrize(
    ("layer", "manifold", "blocks", "shape"),
    [
        (nn.Linear(4, 6), geoopt.Sphere(), None, (6, 4)),
        (nn.Linear(6, 4), geoopt.Sphere(), 2, (2, 2, 6)),
        (nn.Conv2d(2, 4, 3), geoopt.Sphere(), None, (4, 2, 3, 3)),
        (Stack(), geoopt.PoincareBall(), None, (3, 5, 4)),
        (nn.Linear(3, 6), mt.SPD(), 2, (2, 3, 3)),
        (nn.Linear(6, 4), mt.Stiefel(), None, (6, 4)),
        (nn.Conv2d(2, 4, 3), geoopt.EuclideanStiefel(), None, (18, 4)),
    ],
)
def test_a_point_has_the_weights_own_shape_except_on_stiefel(
    layer: Any, manifold: Any, blocks: int | None, shape: tuple[int, ...]
) -> None:
    with torch.no_grad():
        if isinstance(manifold, mt.SPD):
            layer.weight.copy_(torch.eye(3).repeat(2, 1) + 0.1 * layer.weight)
    before = layer.weight.detach().clone()
    mt.constrain(layer, "weight", manifold, blocks=blocks)
    assert stored(layer).shape == shape and layer.weight.shape == before.shape
    assert manifold.check_point_on_manifold(stored(layer).detach(), atol=1e-5)
    rows = before.unflatten(-2, (2, -1)) if blocks else before
    wide = rows.flatten(1).mT if shape[0] in (6, 18) and before.shape[0] == 4 else rows
    torch.testing.assert_close(stored(layer).detach(), manifold.projx(wide), rtol=1e-5, atol=1e-5)


def test_stiefel_is_a_case_of_it() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 4)
    one, two = mt.stiefel(copy.deepcopy(layer), retraction="qr"), mt.constrain(layer, "weight", mt.Stiefel("qr"))
    assert type(one.parametrizations["weight"][0]) is type(two.parametrizations["weight"][0])  # type: ignore[index]
    states = one.state_dict(), two.state_dict()
    assert list(states[0]) == ["bias", "parametrizations.weight.original", "parametrizations.weight.0.form"]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert bytes(states[0]["parametrizations.weight.0.form"].to(torch.uint8).tolist()) == b"stiefel on (4, 6)"
    with pytest.warns(UserWarning, match="weight_hh_l0 stacks 4 matrices") as warned:
        mt.constrain(nn.LSTM(2, 3), "weight_hh_l0", mt.Stiefel())
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("layer", "use", "advice"),
    [
        (
            nn.Linear(4, 4),
            lambda m: mt.constrain(m, "weight", mt.Stiefel),
            "Manifold other than Euclidean.* class Stiefel",
        ),
        (nn.Linear(4, 4), lambda m: mt.constrain(m, "weight", geoopt.Euclidean()), "Euclidean, such as .* a Euclidean"),
        (
            nn.Linear(4, 8),
            lambda m: mt.constrain(m, "weight", mt.SPD()),
            r"Linear.weight of shape \(8, 4\) to hold points of SPD.*must be square.*`blocks`",
        ),
        (nn.Linear(1, 4), lambda m: mt.constrain(m, "weight", geoopt.Sphere()), "isolated points"),
        (
            nn.Linear(4, 4),
            lambda m: mt.constrain(m, "weight", geoopt.UpperHalf()),
            r"Upper Half Space.* points of torch.float32 and shape \(4, 4\), but its projx or its check failed: imag is",
        ),
        (nn.Linear(4, 6), lambda m: mt.constrain(m, "weight", mt.SPD(), blocks=4), "blocks to divide the 6 rows"),
        (
            nn.Linear(4, 6),
            lambda m: mt.constrain(m, "weight", Unfinished()),
            r"projx of Sphere manifold to give a point of this weight of shape \(6, 4\).*norm\(x\) != 1.*check_manifold",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(layer: Any, use: Any, advice: str) -> None:
    before, kind = layer.weight.detach().clone(), type(layer)
    with pytest.raises(ValueError, match=advice):
        use(layer)
    assert type(layer) is kind and isinstance(layer.weight, nn.Parameter) and torch.equal(layer.weight, before)


def test_a_weight_without_a_nearest_point_cannot_be_assigned() -> None:
    layer = mt.constrain(nn.Linear(4, 6), "weight", geoopt.Sphere())
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match="zeros may have none"):
        layer.weight = torch.zeros(6, 4)
    assert torch.equal(layer.weight, before)


def test_the_state_has_the_manifolds_tensors_and_refuses_another_manifold() -> None:
    def ball(curvature: float) -> Any:
        return mt.constrain(nn.Linear(4, 6), "weight", geoopt.PoincareBall(c=curvature))

    source, target = ball(0.5), ball(2.0)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.parametrizations.weight[0].manifold.c, torch.tensor(0.5))
    assert torch.equal(target.weight, source.weight)
    sphere: Any = mt.constrain(nn.Linear(4, 6), "weight", geoopt.Sphere())
    before = sphere.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"expected the state of constrain\(Sphere\) on \(6, 4\), but .*PoincareBall"
    ):
        sphere.load_state_dict(source.state_dict())
    assert torch.equal(sphere.weight, before)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(sphere)


@pytest.mark.parametrize("optimizer", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_layers_of_every_dtype_are_trained_in_a_model(optimizer: Any, dtype: torch.dtype) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    mt.constrain(model[0], "weight", geoopt.PoincareBall())
    mt.constrain(model[1], "weight", geoopt.Sphere())
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert stored(model[0]).dtype == model[0].parametrizations.weight[0].manifold.c.dtype == wide
    trained = optimizer(param_groups(model), lr=0.1)
    x, losses = torch.randn(16, 3, dtype=dtype), []
    for _ in range(30):
        trained.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        trained.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert model[1].weight.dtype == dtype
    assert (norms(stored(model[1])) - 1).abs().max() < 1e-5


def test_a_plain_optimizer_is_warned_of_and_project_returns_the_point() -> None:
    layer = mt.constrain(nn.Linear(4, 6), "weight", geoopt.Sphere())
    layer(torch.randn(8, 4)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"SGD moved Linear.weight of shape \(6, 4\) without its manifold"):
        torch.optim.SGD(layer.parameters(), lr=0.5).step()
    assert (norms(layer.weight) - 1).abs().max() > 1e-2
    with pytest.warns(UserWarning, match="off the manifold"):
        mt.materialize(copy.deepcopy(layer))
    assert (norms(mt.project(layer).weight) - 1).abs().max() < 1e-6
    plain = mt.materialize(layer)
    assert type(plain) is nn.Linear and set(plain.state_dict()) == {"weight", "bias"}


def test_a_layer_on_the_meta_device_takes_a_saved_state() -> None:
    source = mt.constrain(nn.Linear(4, 6), "weight", geoopt.Sphere())
    with torch.device("meta"):
        layer = mt.constrain(nn.Linear(4, 6), "weight", geoopt.Sphere())
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(layer.weight, source.weight)
