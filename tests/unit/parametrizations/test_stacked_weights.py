"""``blocks=``: weights that stack several matrices along their rows, in recurrent layers and in attention."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups

H = 6


def sequence(width: int) -> Tensor:
    return torch.randn(7, 2, width, generator=torch.Generator().manual_seed(3))


def sequence_loss(module: Any) -> Tensor:
    return (module(sequence(module.input_size))[0] - 0.3).pow(2).sum()


def attention_loss(module: Any) -> Tensor:
    x = sequence(H)
    return (module(x, x, x)[0] - 0.3).pow(2).sum()


# name: the layer, its stacked weight, the number of blocks, and a loss of it on some input
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, int, Callable[[Any], Tensor]]] = {
    "RNN": (lambda: nn.RNN(5, H), "weight_hh_l0", 1, sequence_loss),
    "LSTM": (lambda: nn.LSTM(5, H), "weight_hh_l0", 4, sequence_loss),
    "LSTM second layer": (lambda: nn.LSTM(5, H, 2, bidirectional=True), "weight_hh_l1_reverse", 4, sequence_loss),
    "LSTM, wide blocks": (lambda: nn.LSTM(9, H), "weight_ih_l0", 4, sequence_loss),
    "LSTM, tall blocks": (lambda: nn.LSTM(5, H), "weight_ih_l0", 4, sequence_loss),
    "GRU": (lambda: nn.GRU(5, H), "weight_hh_l0", 3, sequence_loss),
    "LSTMCell": (
        lambda: nn.LSTMCell(5, H),
        "weight_hh",
        4,
        lambda m: m(torch.ones(2, 5), (torch.ones(2, H),) * 2)[0].pow(3).sum(),
    ),
    "GRUCell": (lambda: nn.GRUCell(5, H), "weight_hh", 3, lambda m: m(torch.ones(2, 5), torch.ones(2, H)).pow(3).sum()),
    "attention": (lambda: nn.MultiheadAttention(H, 2), "in_proj_weight", 3, attention_loss),
    "conv": (lambda: nn.Conv1d(2, 8, 3), "weight", 2, lambda m: m(sequence(10)).pow(3).sum()),
}
CONSTRAINTS: dict[str, Callable[..., Any]] = {
    "stiefel": mt.stiefel,
    "polar": mt.orthogonal,
    "cayley": lambda m, name, **options: mt.orthogonal(m, name, map="cayley", **options),
}
# A layer and a map never meet: each layer has one constraint, and each constraint an LSTM.
EACH_LAYER = list(zip(LAYERS, itertools.cycle(CONSTRAINTS), strict=False))
every_layer = pytest.mark.parametrize(("layer", "constraint"), EACH_LAYER)
every_pair = pytest.mark.parametrize(
    ("layer", "constraint"), dict.fromkeys([*EACH_LAYER, *(("LSTM", constraint) for constraint in CONSTRAINTS)])
)
every_recurrent_layer = pytest.mark.parametrize(
    ("layer", "constraint"), [pair for pair in EACH_LAYER if pair[0] in ("RNN", "LSTM", "LSTM second layer", "GRU")]
)


def worst_defect(weight: Tensor, blocks: int) -> float:
    """The largest defect among the blocks of rows, written out anew."""
    worst = 0.0
    for block in weight.detach().flatten(1).double().chunk(blocks):
        tall = block if block.shape[0] >= block.shape[1] else block.T
        worst = max(worst, float((tall.T @ tall - torch.eye(tall.shape[1])).norm()) / math.sqrt(tall.shape[1]))
    return worst


@every_pair
def test_each_block_stays_orthonormal_in_training(layer: str, constraint: str) -> None:
    make, name, blocks, loss = LAYERS[layer]
    torch.manual_seed(0)
    module = make()
    before = getattr(module, name).detach().clone()
    assert worst_defect(before, blocks) > 1e-2
    CONSTRAINTS[constraint](module, name, blocks=blocks)
    weight = getattr(module, name)
    assert weight.shape == before.shape and worst_defect(weight, blocks) < 1e-6
    for ours, plain in zip(weight.detach().chunk(blocks), before.chunk(blocks), strict=True):
        U, _, Vh = torch.linalg.svd(plain.flatten(1), full_matrices=False)
        torch.testing.assert_close(ours.flatten(1), U @ Vh, rtol=0, atol=1e-5)  # the nearest one

    optimizer = RiemannianAdam(param_groups(module), lr=0.02)
    start, first = weight.detach().clone(), float(loss(module).detach())
    for _ in range(8):
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()
    weight = getattr(module, name)
    assert (weight - start).abs().max() > 1e-2
    assert float(loss(module).detach()) < first
    assert worst_defect(weight, blocks) < 1e-6


@every_layer
def test_state_and_materialized_weights_give_the_same_outputs(layer: str, constraint: str) -> None:
    make, name, blocks, loss = LAYERS[layer]
    torch.manual_seed(0)
    module, twin = (CONSTRAINTS[constraint](make(), name, blocks=blocks) for _ in range(2))
    assert float(loss(twin).detach()) != float(loss(module).detach())
    twin.load_state_dict(module.state_dict())
    expected = loss(module)
    torch.testing.assert_close(loss(twin), expected, rtol=1e-6, atol=0)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(module.named_parameters()))

    mt.materialize(module)
    assert sorted(n for n, _ in module.named_parameters()) == sorted(n for n, _ in make().named_parameters())
    assert worst_defect(getattr(module, name), blocks) < 1e-6
    module.zero_grad()
    after = loss(module)
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=0)
    after.backward()
    for n, p in module.named_parameters():
        if n in gradients:  # those of the other parameters
            torch.testing.assert_close(p.grad, gradients[n], rtol=1e-4, atol=1e-5)


@every_recurrent_layer
def test_a_used_layer_can_be_copied_averaged_and_assigned_to(layer: str, constraint: str) -> None:
    make, name, blocks, loss = LAYERS[layer]
    model = nn.ModuleList([CONSTRAINTS[constraint](make(), name, blocks=blocks)])
    expected = loss(model[0])
    twin: Any = copy.deepcopy(model)
    assert torch.equal(loss(twin[0]), expected)
    setattr(twin[0], name, torch.randn_like(getattr(twin[0], name)))  # between two forwards
    assert loss(twin[0]) != expected and torch.equal(loss(model[0]), expected)
    average: Any = AveragedModel(model)
    torch.testing.assert_close(loss(average.module[0]), expected)
    plain: Any = make()
    plain.load_state_dict(mt.materialize(copy.deepcopy(twin[0])).state_dict())
    torch.testing.assert_close(loss(twin[0]), loss(plain), rtol=1e-6, atol=0)
    mt.materialize(twin)
    torch.testing.assert_close(loss(copy.deepcopy(twin)[0]), loss(plain), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", ["LSTM second layer", "GRU", "LSTMCell", "GRUCell", "LSTM, tall blocks", "attention"])
def test_gates_constrained_as_one_matrix_warn(layer: str) -> None:
    make, name, blocks, _ = LAYERS[layer]
    module = make()
    with pytest.warns(UserWarning, match=rf"{name} stacks {blocks} matrices.*pass blocks={blocks}"):
        (mt.orthogonal if layer == "GRU" else mt.stiefel)(module, name)
    assert worst_defect(getattr(module, name), 1) < 1e-6 < 1e-2 < worst_defect(getattr(module, name), blocks)


def test_what_is_one_matrix_does_not_warn() -> None:
    mt.stiefel(nn.RNN(5, H), "weight_hh_l0")  # a warning is an error here
    mt.stiefel(nn.LSTM(5, H, proj_size=3), "weight_hr_l0")
    module: Any = mt.orthogonal(nn.LSTM(5, H), "weight_hh_l0", blocks=1)
    assert worst_defect(module.weight_hh_l0, 1) < 1e-6


def test_impossible_blocks_are_refused() -> None:
    module = nn.LSTM(5, H)
    before = {name: p.clone() for name, p in module.named_parameters()}
    impossible: list[Any] = [0, -1, 1.5, True, "4", 5]
    constraints: list[Any] = [mt.stiefel, mt.orthogonal]
    for put_on, blocks in itertools.product(constraints, impossible):
        rows = "divide the 24 rows of LSTM.weight_hh_l0"
        with pytest.raises(ValueError, match=rows if blocks == 5 else "expected blocks to be an integer >= 1"):
            put_on(module, "weight_hh_l0", blocks=blocks)
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
