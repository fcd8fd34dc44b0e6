"""param_groups: every trainable parameter in one group, points with their manifold, decay where it belongs."""

import copy
from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.linalg import defect
from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups


class Mixed(nn.Module):
    """One of everything that a group can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(6, 9)
        self.point = mt.stiefel(nn.Linear(6, 9, bias=False))
        self.other = mt.stiefel(nn.Linear(5, 5, bias=False), retraction="qr")
        self.free = mt.orthogonal(nn.Linear(6, 9, bias=False))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.frozen_point = mt.stiefel(nn.Linear(3, 8, bias=False))
        self.frozen_point.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.ball = geoopt.ManifoldParameter(torch.zeros(2, 3), manifold=geoopt.PoincareBall())
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.plain.weight


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: group for group in groups for name in group["names"]}


def assert_total_and_disjoint(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    grouped = [p for group in groups for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len({id(p) for p in grouped}), "a parameter is in two groups"
    assert {id(p) for p in grouped} == trainable
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert all(parameters[n] is p for group in groups for n, p in zip(group["names"], group["params"], strict=True))


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy], ids=["itself", "deepcopy"])
def test_everything_is_in_its_place(copied: Callable[[Mixed], Mixed]) -> None:
    """In the model itself and in a copy, whose parameters lose every attribute that was set on them."""
    model = copied(Mixed())
    groups = param_groups(model, manifold_lr=0.3, weight_decay=0.1)
    assert_total_and_disjoint(model, groups)
    found = by_name(groups)
    original = "parametrizations.weight.original"
    decay = {name: group["weight_decay"] for name, group in found.items()}
    points = {f"{name}.{original}" for name in ("point", "other", "free")}
    assert decay == {"plain.weight": 0.1, **dict.fromkeys({"plain.bias", "gain", "ball", *points}, 0.0)}
    manifolds = {name: group["manifold"] for name, group in found.items() if "manifold" in group}
    assert manifolds.keys() == {f"point.{original}", f"other.{original}", "ball"}
    assert manifolds[f"point.{original}"].retraction == "polar" and manifolds[f"other.{original}"].retraction == "qr"
    assert isinstance(manifolds["ball"], geoopt.PoincareBall)
    assert all(("lr" in group) == (name in manifolds) for name, group in found.items())
    assert all(found[name]["lr"] == 0.3 for name in manifolds)
    for kind in (RiemannianAdam, RiemannianSGD):
        optimizer = kind(groups, lr=0.01)
        assert [g["lr"] for g in optimizer.param_groups] == [0.3 if "manifold" in g else 0.01 for g in groups]


def test_manifolds_that_move_differently_are_in_different_groups() -> None:
    """Their names may be the same all the same: two balls of different curvature both print as 'PoincareBall manifold'."""
    model = nn.ParameterList(
        [geoopt.ManifoldParameter(torch.zeros(3), manifold=geoopt.PoincareBall(c=c)) for c in (1.0, 4.0)]
    )
    assert repr(model[0].manifold) == repr(model[1].manifold)
    groups = param_groups(model)
    assert_total_and_disjoint(model, groups)
    assert [round(float(by_name(groups)[name]["manifold"].c)) for name in ("0", "1")] == [1, 4]


def test_equal_points_share_a_group() -> None:
    model = nn.Sequential(*(mt.stiefel(nn.Linear(4, 6, bias=False)) for _ in range(3)))
    assert [len(group["params"]) for group in param_groups(model)] == [3]


def test_overrides() -> None:
    model = Mixed()
    overrides: dict[str, Any] = {"plain.b*": {"lr": 5.0}, "plain.*": {"lr": 7.0, "weight_decay": 0.2}}
    overrides["*point*"] = {"lr": 1.0, "second_moment": "row"}
    groups = param_groups(model, manifold_lr=0.3, weight_decay=0.1, overrides=overrides)
    assert_total_and_disjoint(model, groups)
    found = by_name(groups)
    assert (found["plain.bias"]["lr"], found["plain.bias"]["weight_decay"]) == (5.0, 0.0)  # first match wins
    assert (found["plain.weight"]["lr"], found["plain.weight"]["weight_decay"]) == (7.0, 0.2)
    point = found["point.parametrizations.weight.original"]
    assert point["lr"] == 1.0 and point["second_moment"] == "row" and isinstance(point["manifold"], mt.Stiefel)
    assert found["other.parametrizations.weight.original"]["lr"] == 0.3 and "lr" not in found["gain"]
    by_plain_name = by_name(param_groups(model, overrides={"point.weight": {"lr": 2.0}}))
    assert [name for name, group in by_plain_name.items() if group.get("lr") == 2.0] == [
        "point.parametrizations.weight.original"
    ]
    with pytest.raises(ValueError, match=r"no parameter matches 'plain\.x\*'") as caught:
        param_groups(model, overrides={"plain.x*": {}, "gain": {}})
    assert "plain.weight" in str(caught.value) and "'gain'" not in str(caught.value)


def test_a_flattened_point_is_refused() -> None:
    """FSDP1 and ZeRO-3 leave a view of one flat parameter where the point was, or a flat parameter."""
    layer = mt.stiefel(nn.Linear(3, 8, bias=False))
    parts: Any = layer.parametrizations
    kept = parts.weight.original
    del parts.weight._parameters["original"]
    parts.weight.original = kept.data.view(8, 3)
    with pytest.raises(ValueError, match=r"parametrizations\.weight is constrained to Stiefel.*[Ff]lattened"):
        param_groups(nn.Sequential(layer))
    del parts.weight.original
    flat: Tensor = nn.Parameter(kept.data.flatten())
    parts.weight.register_parameter("original", flat)
    with pytest.raises(ValueError, match=r"0\.parametrizations\.weight\.original has shape"):
        RiemannianAdam(param_groups(nn.Sequential(layer)))


def test_no_rate_without_a_rate_and_no_groups_of_a_frozen_model() -> None:
    assert all("lr" not in group for group in param_groups(Mixed()))
    assert param_groups(Mixed().requires_grad_(False)) == []


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def from_meta(model: nn.Module) -> nn.Module:
    state = model.state_dict()
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("replaced", [copy.deepcopy, assigned, from_meta, nn.Module.double])
def test_a_point_keeps_its_manifold_where_its_tensor_is_replaced(replaced: Callable[[nn.Module], nn.Module]) -> None:
    """So that ``model.parameters()`` alone keeps it on the manifold as well."""
    model = replaced(mt.PIT(20, 4, memory="trainable"))
    optimizer = RiemannianAdam(model.parameters(), lr=0.1)
    (point,) = [p for p in model.parameters() if p.shape == (20, 4)]
    point.grad = torch.randn_like(point)
    optimizer.step()
    assert defect(point.detach()) < 1e-6
