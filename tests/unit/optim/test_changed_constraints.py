"""Constraints that come, go and are written over while an optimizer holds the parameter."""

import copy
import gc
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups


def train(layer: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.ones(4, layer.in_features)).square().sum().backward()
        optimizer.step()


def defect(layer: Any) -> float:
    return mt.linalg.defect(layer.weight.detach()).item()


CONSTRAINTS: dict[str, Any] = {
    "stiefel": mt.stiefel,
    "orthogonal": mt.orthogonal,
    "equivalence": lambda layer: mt.equivalence(layer, block_size=4, terms=None),
}
REMOVE: list[Any] = [mt.materialize, lambda layer: parametrize.remove_parametrizations(layer, "weight")]


def assert_refused(change: str, layer: Any, optimizer: Any) -> None:
    """At the next step, by name and before anything is changed; so are a state dict and a copy."""
    (p,) = layer.parameters()
    before, state = p.detach().clone(), copy.copy(optimizer.state[p])
    message = rf"constraint of .*weight.* was {change} after this optimizer was made.*Make the optimizer after"
    saved = type(optimizer)(layer.parameters(), lr=0.1).state_dict()
    uses = (
        lambda: train(layer, optimizer),
        optimizer.state_dict,
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.load_state_dict(saved),
    )
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()
    assert torch.equal(p, before) and optimizer.state[p] == state
    train(layer, type(optimizer)(layer.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("constrain", [*CONSTRAINTS])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_constraint_added_after_the_optimizer_is_refused(kind: Any, constrain: str, steps: int) -> None:
    layer = nn.Linear(8, 16, bias=False)
    optimizer = kind(param_groups(layer, weight_decay=0.1), lr=0.1)
    train(layer, optimizer, steps)
    CONSTRAINTS[constrain](layer)
    assert_refused("added", layer, optimizer)


@pytest.mark.parametrize("remove", REMOVE)
@pytest.mark.parametrize("constrain", [*CONSTRAINTS])
@pytest.mark.parametrize("copied", [False, True])
def test_a_constraint_removed_after_the_optimizer_is_refused(remove: Any, constrain: str, copied: bool) -> None:
    layer = CONSTRAINTS[constrain](nn.Linear(16, 8, bias=False))  # a point is the transpose
    optimizer = RiemannianAdam(param_groups(layer), lr=0.1)
    train(layer, optimizer)
    if copied:
        optimizer, layer = copy.deepcopy((optimizer, layer))
        train(layer, optimizer, 1)
    remove(layer)
    assert_refused("removed", layer, optimizer)


def test_another_constraint_is_refused() -> None:
    layer = mt.stiefel(nn.Linear(8, 16, bias=False))
    optimizer = RiemannianAdam(param_groups(layer), lr=0.1)
    train(layer, optimizer)
    mt.stiefel(mt.materialize(layer), retraction="qr")
    assert_refused("replaced", layer, optimizer)


def test_a_removed_constraint_is_gone_though_its_list_is_held() -> None:
    layer: Any = mt.stiefel(nn.Linear(8, 16, bias=False))
    held = layer.parametrizations.weight
    parametrize.remove_parametrizations(layer, "weight")
    plain = copy.deepcopy(layer)
    train(layer, RiemannianAdam(layer.parameters(), lr=0.1))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0))
    assert torch.equal(layer.weight, plain.weight) and not list(held.parameters())


def test_a_copy_of_the_optimizer_alone_keeps_its_points() -> None:
    layer = mt.stiefel(nn.Linear(8, 16, bias=False))
    optimizer = RiemannianAdam(layer.parameters(), lr=0.1)
    train(layer, optimizer)
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["state"].keys() == {0}
    (p,) = (p for group in copied.param_groups for p in group["params"])
    p.grad = torch.randn(16, 8)
    copied.step()
    assert mt.linalg.defect(p.detach()).item() < 1e-5


def test_a_constraint_may_come_after_a_compiled_step() -> None:
    layer = nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.1))
    layer(torch.ones(4, 8)).square().sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert defect(mt.stiefel(layer)) < 1e-5


@pytest.mark.parametrize("wide", [False, True])
def test_reset_parameters_draws_a_point(wide: bool) -> None:
    layer: Any = mt.stiefel(nn.Linear(16, 8) if wide else nn.Linear(8, 16))
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    weight = layer.weight.detach()
    assert mt.linalg.defect(weight.mT if wide else weight) < 1e-5 and not torch.allclose(weight, before, atol=0.1)


def test_a_point_that_nn_init_wrote_to_is_restored_at_the_next_step() -> None:
    layer: Any = mt.stiefel(nn.Linear(8, 16))
    optimizer = RiemannianAdam(layer.parameters(), lr=0.1)
    train(layer, optimizer)
    nn.init.normal_(layer.weight)
    assert defect(layer) > 0.5
    with pytest.raises(ValueError, match=r"written in place, as nn.init does"):
        RiemannianAdam(layer.parameters(), lr=0.1)
    train(layer, optimizer, 1)
    assert defect(layer) < 1e-5


def test_a_point_that_was_written_to_moves_from_the_nearest_one() -> None:
    written, nearest = (mt.stiefel(nn.Linear(8, 16)) for _ in range(2))
    optimizers = [RiemannianSGD(layer.parameters(), lr=0.1) for layer in (written, nearest)]
    nn.init.normal_(written.weight)
    nearest.weight = written.weight.detach().clone()
    slope = torch.randn(16, 8)
    for layer, optimizer in zip((written, nearest), optimizers, strict=True):
        (layer.weight * slope).sum().backward()
        optimizer.step()
    torch.testing.assert_close(written.weight, nearest.weight)


def test_euclidean_manifold_parameters_are_ordinary() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight: Tensor = geoopt.ManifoldParameter(torch.ones(3, 3))

    (group,) = param_groups(Model(), manifold_lr=1.0, weight_decay=0.1)
    assert group["weight_decay"] == 0.1 and "manifold" not in group and "lr" not in group


@pytest.mark.parametrize("constrain", [mt.stiefel, mt.orthogonal, mt.equivalence])
def test_a_tied_weight_is_refused(constrain: Any) -> None:
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    with pytest.raises(ValueError, match=r"Linear.weight is also a parameter under another name .* Untie it"):
        constrain(head)
    assert head.weight is embedding.weight and torch.equal(embedding.weight, before)
    head.weight = nn.Parameter(head.weight.detach().clone())
    constrain(head)
    with pytest.raises(ValueError, match=r"in_proj_weight is also a parameter under another name"):
        constrain(twice_named(), "in_proj_weight")


def twice_named() -> nn.Module:
    module = nn.MultiheadAttention(4, 2)
    module.again = module.in_proj_weight
    return module


def test_a_model_with_an_optimizer_is_searched_once_for_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[5].weight = model[4].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    searches, search = [], gc.get_referrers

    def counted(*objects: Any) -> list[Any]:
        searches.append(len(objects))
        return search(*objects)

    monkeypatch.setattr(gc, "get_referrers", counted)
    taken, left = mt.equivalence_(model, block_size=4, verbose=False)
    assert (taken, left) == (["0", "1", "2", "3"], ["4", "5"]) and len(searches) == 2


def test_groups_of_what_is_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a model .* got generator"):
        param_groups(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected overrides to map a pattern to options, .* got 0.1"):
        param_groups(nn.Linear(2, 2), overrides={"*": 0.1})  # type: ignore[dict-item]


@pytest.mark.parametrize("other", ["another module's tensor", "a new name there", "a new name", "weight_orig of prune"])
def test_another_name_for_a_point_leaves_its_layer_as_it_is(other: str) -> None:
    layer: Any = mt.stiefel(nn.Linear(16, 16, bias=False))
    optimizer = RiemannianAdam(layer.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    recurrent: Any = mt.orthogonal(nn.RNN(16, 16), "weight_hh_l0")
    if other == "another module's tensor":
        recurrent.weight_ih_l0 = layer.weight
        recurrent(torch.ones(2, 16))
    elif other == "a new name there":
        recurrent.alias = layer.weight
    elif other == "a new name":
        layer.alias = layer.weight
        del layer.alias
    else:
        with pytest.raises(KeyError):
            prune.l1_unstructured(layer, "weight", 0.5)
        del layer.weight_orig
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    train(layer, optimizer)
    assert defect(layer) < 1e-5
