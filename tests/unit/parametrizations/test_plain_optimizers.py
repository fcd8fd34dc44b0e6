"""A point in an optimizer without manifolds: warned of once, by name, at its first step."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import geoopt
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.parametrizations import parametrized

WARNING = "without its manifold"


def layer() -> nn.Module:
    return mt.stiefel(nn.Linear(4, 9))


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(4).sum().backward()
    optimizer.step()


def silent(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        step(model, optimizer)  # a warning is an error here


def defect(model: Any) -> float:
    return float(mt.linalg.defect(model.weight.detach()))


MAKERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "parameters": (
        lambda m: torch.optim.AdamW(m.parameters()),
        r"torch.optim.*AdamW moved Linear.weight of shape \(9, 4\)",
    ),
    "named": (lambda m: torch.optim.Adam(m.named_parameters()), "Adam moved parametrizations.weight.original"),
    "our groups": (lambda m: torch.optim.AdamW(param_groups(m)), "AdamW moved parametrizations.weight.original"),
    "geoopt": (lambda m: geoopt.optim.RiemannianAdam(m.parameters()), "geoopt.*RiemannianAdam moved Linear.weight"),
    "fused": (lambda m: torch.optim.Adam(m.parameters(), fused=True), "Adam moved Linear.weight"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_plain_optimizer_on_a_point_warns_once(name: str) -> None:
    make, message = MAKERS[name]
    model = layer()
    optimizer = make(model)
    with pytest.warns(UserWarning, match=message) as caught:
        step(model, optimizer)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "RiemannianAdam(model.parameters())" in str(caught[0].message)
    silent(model, optimizer, 3)
    assert defect(model) > 1e-6  # and it was right to warn


def test_of_many_points_five_are_named() -> None:
    for count, end in ((5, r"shape \(9, 4\) without"), (7, r"shape \(9, 4\) and 2 more without")):
        model = nn.ModuleList(layer() for _ in range(count))
        with pytest.warns(UserWarning, match=end) as caught:
            sum(part(torch.ones(4)).sum() for part in model).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert str(caught[0].message).count("Linear.weight") == 5


def test_geoopts_optimizers_keep_geoopts_own_parameters() -> None:
    model = nn.Linear(4, 9)
    model.weight = geoopt.ManifoldParameter(model.weight.detach().clone(), manifold=mt.Stiefel())
    mt.stiefel(model)
    silent(model, geoopt.optim.RiemannianAdam(model.parameters(), lr=0.01), 5)
    assert defect(model) < 1e-6


def test_frozen_points_are_no_reason_until_they_move() -> None:
    model = nn.Sequential(layer(), nn.Linear(9, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    silent(model, optimizer, 2)
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match=WARNING):
        step(model, optimizer)
    silent(model, optimizer)


def test_a_group_added_later_and_a_constraint_put_on_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    silent(model, optimizer, 2)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.warns(UserWarning, match=r"SGD moved Linear.weight of shape \(9, 4\) without"):
        step(model, optimizer)
    mt.stiefel(model[0])
    with pytest.warns(UserWarning, match=r"SGD moved Linear.weight of shape \(4, 4\) without"):
        step(model, optimizer)
    silent(model, optimizer)


def test_a_weight_that_is_free_again_is_no_reason() -> None:
    model = layer()
    parametrize.remove_parametrizations(model, "weight")
    silent(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_points_too(copied: Callable[[Any], Any]) -> None:
    point = copied(parametrized(mt.PIT(12, 4, memory="trainable"))["memory"])
    optimizer = torch.optim.SGD(point.parameters(), lr=0.1)
    point.original.grad = torch.ones_like(point.original)
    with pytest.warns(UserWarning, match=r"SGD moved ManifoldPIT.memory of shape \(12, 4\)"):
        optimizer.step()


def test_with_a_scheduler_and_inside_a_wrapper() -> None:
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        step(model, optimizer)
    scheduler.step()
    assert len(caught) == 1
    model = layer()
    optimizer = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    with pytest.warns(UserWarning, match=WARNING) as caught:
        step(model, optimizer)
    assert len(caught) == 1 and "torch.optim.adamw.AdamW moved" in str(caught[0].message)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that leaves the step to another one, as sharding ones do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_of_two_optimizers_around_each_other_the_inner_one_counts() -> None:
    model = layer()
    silent(model, Wrapper(RiemannianAdam(model.parameters())))
    model = layer()
    with pytest.warns(UserWarning, match="AdamW moved") as caught:
        step(model, Wrapper(torch.optim.AdamW(model.parameters())))
    assert len(caught) == 1


def test_a_compiled_step_warns_and_takes_no_more_graphs() -> None:
    graphs: list[int] = []
    for model in (nn.Linear(4, 9), layer()):
        backend = CompileCounterWithBackend("eager")
        torch._dynamo.reset()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
        compiled = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend=backend)
        for repeat in range(3):
            model(torch.randn(8, 4)).pow(2).sum().backward()
            warned = len(graphs) == 1 and repeat == 0
            with pytest.warns(UserWarning, match="AdamW moved Linear.weight") if warned else nullcontext():
                compiled()
        graphs.append(backend.frame_count)
    assert graphs[0] == graphs[1] > 0 and defect(model) > 1e-6
