"""States of optimizers and writes by others that do not fit how a parameter is constrained."""

from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, RiemannianSGD

PUT_ON: dict[str, Callable[[nn.Linear], Any]] = {
    "plain": lambda layer: layer,
    "stiefel": mt.stiefel,
    "rows": mt.sphere,
    "theirs": lambda layer: mt.constrain(layer, "weight", geoopt.Sphere()),  # one second moment per row
    "columns": lambda layer: mt.sphere(layer, of="columns"),
}


def stepped(name: str, make: Any) -> Any:
    torch.manual_seed(0)
    layer = PUT_ON[name](nn.Linear(8, 16, bias=False))
    optimizer = make(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    ("saved", "loaded"), [("theirs", "stiefel"), ("stiefel", "theirs"), ("theirs", "columns"), ("theirs", "plain")]
)
def test_a_state_of_another_constraint_is_refused(saved: str, loaded: str) -> None:
    _, other = stepped(saved, RiemannianAdam)
    _, optimizer = stepped(loaded, RiemannianAdam)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"exp_avg_sq of shape .* constrained otherwise"):
        optimizer.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg_sq"], before["state"][0]["exp_avg_sq"])
    optimizer.load_state_dict(before)
    optimizer.step()


def test_a_zero_row_is_named_before_it_makes_nan() -> None:
    layer, optimizer = stepped("rows", lambda params, lr: RiemannianSGD(params, lr=lr, momentum=0.9))
    with torch.no_grad():
        layer.weight[3] = 0
    with pytest.raises(ValueError, match="no nearest point of Sphere"):
        optimizer.step()
    with pytest.raises(ValueError, match="weight has no nearest point"):
        mt.project(layer)
    assert layer.weight.isfinite().all() and not layer.weight[3].any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRUCell])
@pytest.mark.parametrize("put_on", [mt.stiefel, mt.orthogonal])
def test_recurrent_layers_are_reset_to_fresh_weights(kind: Any, put_on: Any) -> None:
    name = "weight_hh" if kind is nn.GRUCell else "weight_hh_l0"
    layer = put_on(kind(4, 6), name, blocks=1)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        layer.reset_parameters()
        drawn.append(getattr(layer, name).detach().clone())
    assert torch.equal(drawn[0], drawn[1]) and torch.dist(drawn[0], drawn[2]) > 0.1
    torch.testing.assert_close(drawn[2].T @ drawn[2], torch.eye(6), rtol=0, atol=1e-5)
