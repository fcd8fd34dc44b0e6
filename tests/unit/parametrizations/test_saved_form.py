"""A state dict says which constraint it belongs to: another's is refused by name and changes nothing."""

import itertools
from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import manifold_tying as mt

Make = Callable[[nn.Module], Any]
# All store one 8 x 8 tensor for an 8 x 8 weight.
MAKERS: dict[str, Make] = {
    "stiefel": mt.stiefel,
    "polar": mt.orthogonal,
    "qr": lambda m: mt.orthogonal(m, map="qr"),
    "cayley": lambda m: mt.orthogonal(m, map="cayley"),
    "cayley-neumann": lambda m: mt.orthogonal(m, map="cayley-neumann"),
    "spd": lambda m: mt.spd(m, "weight"),
    "spd, exp": lambda m: mt.spd(m, "weight", diagonal="exp"),
    "sphere": mt.sphere,
    "sphere, radius": lambda m: mt.sphere(m, radius=2.0),
    "geoopt's sphere": lambda m: mt.constrain(m, "weight", geoopt.Sphere()),
}
THEIRS: dict[str, Make] = {
    f"torch's {name}": lambda m, name=name: parametrizations.orthogonal(m, orthogonal_map=name)  # type: ignore[misc]
    for name in ("cayley", "matrix_exp", "householder")
}


def layer(make: Make, seed: int) -> Any:
    """A trained layer: its stored tensor is no longer what the constraint started from."""
    torch.manual_seed(seed)
    linear = nn.Linear(8, 8)
    linear.weight.data.copy_(torch.eye(8) + 0.1 * torch.randn(8, 8))
    made = make(linear)
    stored = made.parametrizations.weight.original
    if make is not mt.stiefel:
        stored.data += 0.2 * torch.randn_like(stored).tril(-1)
    return made


@pytest.mark.parametrize("saved", [*MAKERS, *THEIRS])
def test_the_state_of_another_constraint_is_refused_and_its_weight_can_be_assigned(saved: str) -> None:
    source = layer((MAKERS | THEIRS)[saved], 1)
    for name, make in MAKERS.items():
        target = layer(make, 2)
        before = {key: value.clone() for key, value in target.state_dict().items()}
        for strict, assign in itertools.product((True, False), repeat=2):
            if name == saved:
                target.load_state_dict(source.state_dict(), strict=strict, assign=assign)
                assert torch.equal(target.weight, source.weight)
                continue
            with pytest.raises(
                RuntimeError, match=r"weight\.0\.form: expected the state of .* layer\.weight = other\.weight"
            ):
                target.load_state_dict(source.state_dict(), strict=strict, assign=assign)
            after = target.state_dict()
            constrained = [key for key in before if "parametrizations" in key]
            assert all(torch.equal(after[key], before[key]) for key in constrained), "refused, yet changed"
    if "spd" not in saved:
        target = layer(mt.orthogonal, 2)
        target.weight = source.weight
        U, _, Vh = torch.linalg.svd(source.weight.detach().double())
        torch.testing.assert_close(target.weight.double(), U @ Vh, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("saved", "other"), [({"diagonal": "exp"}, {}), ({}, {"diagonal": "exp"})])
def test_pit_refuses_another_map_of_its_transform(saved: dict[str, Any], other: dict[str, Any]) -> None:
    source, target = mt.PIT(32, 8, memory="trainable", **saved), mt.PIT(32, 8, memory="trainable", **other)
    with pytest.raises(RuntimeError, match=r"cholesky_factor\.0\.form: expected the state of cholesky_factor"):
        target.load_state_dict(source.state_dict())
    mt.PIT(32, 8, memory="frozen", retraction="qr", **saved).load_state_dict(source.state_dict())  # the same tensors


CONSTRAINED: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda make=make: make(nn.Linear(8, 8)) for name, make in MAKERS.items()},  # type: ignore[misc]
    "equivalence": lambda: mt.equivalence(nn.Conv2d(4, 8, 3), block_size=4),
    "PIT": lambda: mt.PIT(32, 8, memory="trainable"),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_every_name_of_a_state_is_a_parameter_or_a_buffer(name: str) -> None:
    """Libraries that write a checkpoint's tensors by their names must find them."""
    model = CONSTRAINED[name]()
    known: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in known.items()}


def test_an_average_of_buffers_keeps_the_form() -> None:
    model = mt.stiefel(nn.Linear(8, 8))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    for _ in range(20):
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


@pytest.mark.parametrize("name", MAKERS)
def test_averages_and_casts_of_states_load(name: str) -> None:
    states = [layer(MAKERS[name], seed).state_dict() for seed in range(3)]
    average = {key: sum(state[key] for state in states) / 3 for key in states[0]}
    weighted = {key: 0.3 * states[0][key] + 0.7 * states[1][key] for key in states[0]}
    for state in (average, weighted, *({k: v.to(d) for k, v in average.items()} for d in (torch.half, torch.bfloat16))):
        layer(MAKERS[name], 4).load_state_dict(state)


def test_averaged_places_of_an_equivalence_are_refused() -> None:
    state = mt.equivalence(nn.Linear(8, 8), block_size=4).state_dict()
    key = "parametrizations.weight.0.in_places"
    model = mt.equivalence(nn.Linear(8, 8), block_size=4)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="in_places: a place is taken twice"):
        model.load_state_dict(state | {key: state[key] // 2})
    assert torch.equal(model.weight, before)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(10):
        average.update_parameters(model)
    with pytest.raises(ValueError, match="a place is taken twice; were integer buffers averaged"):
        average.module(torch.randn(2, 8))
