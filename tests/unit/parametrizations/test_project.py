"""Points that are off their manifold: projected by one call, and warned of where they are used."""

import copy
import math
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups


class Unit(nn.Module):
    """A user's own parametrization: the stored tensor is a point of a geoopt manifold."""

    def __init__(self) -> None:
        super().__init__()
        self.manifold = geoopt.Sphere()

    def forward(self, stored: Tensor) -> Tensor:
        return stored

    def right_inverse(self, weight: Tensor) -> Tensor:
        return self.manifold.projx(weight)


class Mixed(nn.Module):
    """A point of each kind, and an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = mt.stiefel(nn.Linear(4, 8))
        self.own = nn.Linear(4, 8)
        parametrize.register_parametrization(self.own, "weight", Unit())
        self.theirs = geoopt.ManifoldParameter(torch.eye(8, 4), manifold=geoopt.EuclideanStiefel())
        self.plain = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.ours(x) + self.own(x) + x @ self.theirs.T + self.plain(x)

    def off(self) -> list[float]:
        """How far each point is from its manifold, by formulas of its own."""
        eye = torch.eye(4)
        gram = [W.detach().T @ W.detach() - eye for W in (self.ours.weight, self.theirs)]
        own = self.own.weight.detach().norm(dim=-1) - 1
        return [float(gram[0].abs().max()), float(own.abs().max()), float(gram[1].abs().max())]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None = None) -> None:
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(16, 4)) - 1).square().mean().backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)


def test_points_of_every_kind_are_found_among_parameters() -> None:
    torch.manual_seed(0)
    model = Mixed()
    train(model, RiemannianAdam(model.parameters(), lr=0.05))
    assert max(model.off()) < 1e-5


def test_a_plain_optimizer_warns_of_points_of_every_kind() -> None:
    torch.manual_seed(0)
    model = Mixed()
    with pytest.warns(UserWarning, match="moved") as caught:
        train(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    message = str(caught[0].message)
    assert len(caught) == 1 and all(
        part in message for part in ("Linear.weight", "a point of shape", "a geoopt.ManifoldParameter")
    )
    assert min(model.off()) > 1e-3, "it was right to warn"


def test_an_average_is_warned_of_and_projected() -> None:
    torch.manual_seed(0)
    model = Mixed()
    average = AveragedModel(model)
    train(model, RiemannianAdam(model.parameters(), lr=0.1), average)
    found: Any = average.module
    assert min(found.off()) > 1e-3
    plain = found.plain.weight.detach().clone()
    U, _, Vh = torch.linalg.svd(found.ours.weight.detach().double(), full_matrices=False)
    with pytest.warns(UserWarning, match="off the manifold: module.*project") as caught:
        mt.materialize(AveragedModel(average.module))
    assert all(name in str(caught[0].message) for name in ("ours.weight", "own.weight", "theirs"))
    assert mt.project(average) is average and max(found.off()) < 1e-5
    torch.testing.assert_close(found.ours.weight.double(), U @ Vh, rtol=0, atol=1e-5)
    assert torch.equal(found.plain.weight, plain)
    mt.materialize(average)
    assert [type(p) for p in average.parameters()] == [nn.Parameter] * 7 and max(found.off()) < 1e-5
    assert {name for name, _ in found.named_parameters()} == {
        "theirs", *(f"{layer}.{name}" for layer in ("ours", "own", "plain") for name in ("weight", "bias"))
    }  # fmt: skip
    train(found, torch.optim.AdamW(found.parameters()))  # without a warning


def test_a_constraint_of_others_that_comes_or_goes_after_the_optimizer_is_refused() -> None:
    model: Any = Mixed()
    with_all = RiemannianAdam(param_groups(model), lr=0.05)
    parametrize.remove_parametrizations(model.own, "weight")
    with pytest.raises(ValueError, match=r"constraint of own.*original was removed after this optimizer was made"):
        train(model, with_all)
    with_plain = RiemannianAdam(param_groups(model), lr=0.05)
    parametrize.register_parametrization(model.own, "weight", Unit())
    with pytest.raises(ValueError, match=r"constraint of own.weight was added after"):
        train(model, with_plain)
    parametrize.remove_parametrizations(model.own, "weight")
    held = sorted(model.parameters(), key=id)
    materialized = sorted(mt.materialize(model).parameters(), key=id)
    assert all(p is q for p, q in zip(held, materialized, strict=True))
    assert not any(isinstance(p, geoopt.ManifoldParameter) for p in materialized)
    with pytest.raises(ValueError, match=r"constraint of theirs was removed"):
        train(model, with_plain)
    train(model, torch.optim.AdamW(model.parameters()))  # without a warning


def test_a_trainable_memory_that_was_averaged_is_warned_of() -> None:
    pit: Any = mt.PIT(32, 8, memory="trainable")
    pit.parametrizations.memory.original.data.mul_(0.9)
    with pytest.warns(UserWarning, match=r"off the manifold: memory"):
        pit.materialize()
    E, W_out = mt.project(pit).materialize()
    torch.testing.assert_close(W_out @ E, torch.eye(8), rtol=0, atol=1e-5)


def test_points_with_nan_are_refused_before_any_is_projected() -> None:
    model: Any = Mixed()
    model.own.parametrizations.weight.original.data[0, 0] = math.nan
    model.ours.weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"own.weight contain NaN or Inf; nothing was projected"):
        mt.project(model)
    assert model.off()[0] > 1


def test_a_point_without_a_nearest_one_is_refused_before_any_is_projected() -> None:
    model = nn.Sequential(mt.sphere(nn.Linear(4, 6)), mt.sphere(nn.Linear(6, 3)))
    first, last = (layer.get_parameter("parametrizations.weight.original") for layer in model)
    with torch.no_grad():
        first.mul_(2)
        last[1] = 0
    before = first.detach().clone()
    with pytest.raises(ValueError, match=r"1.weight has no nearest point of Sphere.*; nothing was projected"):
        mt.project(model)
    assert torch.equal(first, before)


@pytest.mark.parametrize(("special", "wide"), [(False, 16), (False, 8), (True, 16)])
def test_averaged_cayley_maps_are_orthonormal_once_projected(special: bool, wide: int) -> None:
    torch.manual_seed(0)
    layers = [mt.orthogonal(nn.Linear(16, wide), map="cayley", special=special) for _ in range(2)]
    first, second = (layer.state_dict() for layer in layers)
    layers[0].load_state_dict({key: (first[key] + second[key]) / 2 for key in first})
    assert mt.linalg.defect(layers[0].weight) > 0.1 and mt.optim.drift(layers[0])["weight"] > 0.1
    with pytest.warns(UserWarning, match=r"off the manifold: weight .*project"):
        mt.materialize(copy.deepcopy(layers[0]))
    W = mt.project(layers[0]).weight.double()
    torch.testing.assert_close(W @ W.mT, torch.eye(wide, dtype=W.dtype), rtol=0, atol=1e-5)
    assert not special or torch.linalg.det(W) > 0


def test_a_base_with_nan_is_refused_before_any_point_is_projected() -> None:
    model: Any = nn.Sequential(mt.stiefel(nn.Linear(8, 8)), mt.orthogonal(nn.Linear(8, 8), map="cayley"))
    model[0].weight.data.mul_(2)
    model[1].parametrizations.weight[0].base[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"1.weight contain NaN or Inf; nothing was projected"):
        mt.project(model)
    assert mt.linalg.defect(model[0].weight) > 1
