"""PIT as one free table: what it promises about W_out E, how often it forms WᵀW, and that any optimizer trains it."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import conditioned
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.tying import FreePIT, ManifoldPIT

V, D = 60, 8
ROUNDING = 6e-8  # half a unit in the last place of a float32


def free(condition: float = 10.0, rows: int = V, columns: int = D, seed: int = 0) -> FreePIT:
    """A free table with singular values spread evenly in the logarithm."""
    pit = mt.PIT(rows, columns)
    assert isinstance(pit, FreePIT)
    with torch.no_grad():
        pit.table.copy_(conditioned((rows, columns), condition, seed))
    return pit


@torch.no_grad()
def distance(pit: FreePIT) -> float:
    """‖W_out E - I‖_F / √d of the numbers that the interface computes with."""
    E = pit.embed(torch.arange(pit.vocab_size)).double()
    W_out = pit.logits(torch.eye(pit.hidden_size, dtype=pit.table.dtype)).double()
    return float((W_out @ E - torch.eye(pit.hidden_size)).norm()) / pit.hidden_size**0.5


def products(use: Callable[[], object], d: int = D) -> float:
    """Products of 2Vd² operations that ``use`` takes."""
    with FlopCounterMode(display=False) as counter:
        use()
    return counter.get_total_flops() / (2 * V * d * d)


@given(st.floats(0, 3), st.integers(1, 24), st.integers(0, 60), st.integers(0, 2**31), st.sampled_from([1e-3, 1e3]))
def test_w_out_inverts_e(digits: float, d: int, extra: int, seed: int, size: float) -> None:
    condition = 10**digits
    pit = free(condition, d + extra, d, seed)
    with torch.no_grad():
        pit.table.mul_(size)
    assert distance(pit) <= ROUNDING * condition + 2e-7  # the latter is the copied table's own rounding
    assert distance(pit.double()) <= 1e-13 + 1e-16 * condition**2  # the Gram matrix has the square of the condition


def test_the_polar_factors_are_the_memory_and_the_transform() -> None:
    pit = free(50.0).double()
    Z, T, L = pit.memory, pit.transform, pit.cholesky_factor
    assert torch.allclose(Z @ T, pit.table) and torch.allclose(Z.T @ Z, torch.eye(D, dtype=T.dtype))
    assert torch.allclose(T, T.T) and torch.allclose(L @ L.T, T) and torch.equal(L, L.tril())
    on_manifold = mt.PIT(V, D, memory="trainable").double()
    on_manifold.memory, on_manifold.cholesky_factor = Z.detach(), L.detach()
    for ours, theirs in zip(pit.materialize(), on_manifold.materialize(), strict=True):
        assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("transform", ["identity", "head", "embedding"])
def test_a_table_starts_it_as_it_starts_z_and_t(transform: Any) -> None:
    E0 = torch.randn(V, D, dtype=torch.float64)
    memories: tuple[mt.tying.Memory, ...] = ("free", "trainable")
    free, apart = (mt.PIT.from_embedding(E0, transform=transform, memory=memory) for memory in memories)
    assert isinstance(apart, ManifoldPIT) and not isinstance(apart.to_free(), ManifoldPIT)
    for pit in (apart, apart.to_free()):
        assert all(map(torch.allclose, pit.materialize(), free.materialize()))


def test_a_start_from_a_table_takes_one_polar_factor_and_no_random_numbers() -> None:
    E0, before = torch.randn(V, D), torch.get_rng_state()
    once = products(lambda: mt.linalg.polar(E0.double()))
    starts: list[dict[str, Any]] = [{}, {"memory": "frozen", "transform": "head"}]
    for options in starts:
        assert once <= products(lambda options=options: mt.PIT.from_embedding(E0, **options)) < 1.5 * once  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_by_to_free_is_a_copy() -> None:
    pit = mt.PIT(V, D, memory="frozen")
    twin = pit.to_free()
    assert isinstance(twin, FreePIT)
    before = pit.materialize()
    with torch.no_grad():
        twin.table.mul_(2.0)
    assert all(map(torch.equal, pit.materialize(), before)) and twin.table.requires_grad


def test_gradients_are_those_of_the_formula() -> None:
    pit = free(rows=9, columns=3).double()
    ids = torch.tensor([[3, 1, 3], [0, 7, 7]])

    def embed(W: Tensor) -> Tensor:
        return torch.func.functional_call(pit, {"table": W}, (ids,))

    W = pit.table.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(embed, (W,)) and torch.autograd.gradgradcheck(embed, (W,))
    assert torch.allclose(
        torch.func.jacrev(embed)(W),
        torch.autograd.functional.jacobian(lambda W: (W @ torch.linalg.inv(W.T @ W))[ids], W),
    )


def test_gram_matrices_are_formed_once_per_change() -> None:
    pit = free()
    ids = torch.arange(5)
    once = products(lambda: pit.embed(ids)) - 5 / V  # the embedding's own product
    assert once == pytest.approx(1.0)

    def formed() -> bool:
        return products(lambda: pit.embed(ids)) > 1

    assert not formed()  # micro-batches
    with torch.no_grad():
        assert not formed()  # generation
        pit.table[3, 2] += 1e-3
    assert formed() and not formed()
    pit.table.data.mul_(1.01)  # as EMA weights and some optimizers write
    assert formed() and not formed()
    pit.load_state_dict(free(seed=1).state_dict())
    assert formed() and not formed()
    pit.table = nn.Parameter(torch.randn(V, D))
    assert formed() and not formed()
    pit.double()
    assert formed() and not formed()
    twin = copy.deepcopy(pit)
    with torch.no_grad():
        twin.table.neg_()[0] *= 2
    assert torch.allclose(twin.embed(ids), twin.materialize()[0][ids]) and not formed()


def test_evaluation_in_inference_mode_leaves_training_alone() -> None:
    pit, ids = mt.PIT(50, 8), torch.arange(10).view(2, 5)
    with torch.inference_mode():
        evaluated = pit.loss(pit.embed(ids), ids)
    loss = pit.loss(pit.embed(ids), ids)
    loss.backward()
    assert torch.equal(loss.detach(), evaluated)


def test_materialized_tables_of_one_column_are_copies() -> None:
    pit: Any = mt.PIT(5, 1).double()
    E, W_out = pit.materialize()
    assert not W_out.requires_grad and W_out.data_ptr() != pit.table.data_ptr() != E.data_ptr()


def test_a_training_step_takes_two_large_products() -> None:
    ids, targets = torch.arange(1), torch.arange(1)

    def step(interface: mt.TokenInterface) -> float:
        return products(lambda: interface.loss(interface.embed(ids), targets).backward())

    assert step(free()) - step(mt.TransposeTying(V, D)) == pytest.approx(2.0, abs=8 / V)


def test_a_rank_deficient_table_is_named() -> None:
    pit = free()
    with torch.no_grad():
        pit.table[:, 2] = pit.table[:, 5]
    for use in (lambda: pit.embed(torch.arange(3)), pit.materialize):
        with pytest.raises(ValueError, match=r"full column rank.*duplicate or zero columns"):
            use()
    with torch.no_grad():
        pit.table.fill_(torch.nan)
    assert pit.embed(torch.arange(3)).isnan().all()  # a diverged run reports its loss


@pytest.mark.parametrize("memory", ["free", "trainable"])
def test_the_loss_where_two_singular_values_vanish(memory: Any) -> None:
    """The head inverts nothing: its loss and gradients are those of all logits, where E is not determined or overflows."""
    t = torch.linspace(1, 2, D, dtype=torch.float64)
    pit: Any = mt.PIT(V, D, memory=memory).double()
    with torch.no_grad():
        if memory == "free":
            t[2:4] = 0
            pit.table.copy_(torch.linalg.qr(torch.randn(V, D).double())[0] * t)
        else:
            t[2:4] = 1e-40
            pit.cholesky_factor = t.sqrt().diag()
        assert (torch.linalg.svdvals(pit.head_weight)[-2:] < 1e-14).all()
    hidden, targets = torch.randn(30, D, dtype=torch.float64, requires_grad=True), torch.arange(30)
    trained = [hidden, *pit.parameters()]
    losses = [pit.loss(hidden, targets), nn.functional.cross_entropy(hidden @ pit.head_weight.mT, targets)]
    found, expected = (torch.autograd.grad(loss, trained) for loss in losses)
    for a, b in zip([losses[0], *found], [losses[1], *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
        assert b.abs().max() > 0


def test_low_precision_leaves_the_table_alone() -> None:
    pit = free().bfloat16()
    assert pit.table.dtype == torch.float32 and pit.embed(torch.arange(3)).dtype == torch.bfloat16
    assert pit.logits(torch.randn(3, D, dtype=torch.bfloat16)).dtype == torch.bfloat16
    hidden = torch.randn(7, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pit.embed(torch.arange(V)), free().bfloat16().embed(torch.arange(V)))
        assert pit.logits(hidden).dtype == torch.bfloat16


def test_torch_optimizers_train_it_as_ours_do() -> None:
    trained = []
    for make in (
        lambda pit: torch.optim.AdamW(pit.parameters(), lr=1e-2, weight_decay=0.0),
        lambda pit: RiemannianAdam(param_groups(pit), lr=1e-2),
    ):
        pit = free()
        optimizer, generator = make(pit), torch.Generator().manual_seed(0)
        losses = []
        for _ in range(30):
            ids = torch.randint(V, (40,), generator=generator)
            optimizer.zero_grad()
            loss = pit.loss(pit.embed(ids), (ids + 1) % V)
            loss.backward()
            optimizer.step()  # a warning is an error here
            losses.append(loss.item())
        assert losses[-1] < losses[0] and distance(pit) <= 1e-5
        trained.append(losses)
    assert trained[0] == trained[1]


def test_options_of_another_memory_are_refused() -> None:
    foreign: list[Any] = [{"retraction": "qr"}, {"diagonal": "exp"}]
    for options, make in itertools.product(
        foreign, (partial(mt.PIT, V, D), partial(mt.PIT.from_embedding, torch.randn(V, D)))
    ):
        with pytest.raises(ValueError, match="memory='free' has no"):
            make(**options)
    with pytest.raises(ValueError, match="memory='frozen' has no std"):
        mt.PIT(V, D, memory="frozen", std=0.1)


@pytest.mark.parametrize(("d", "std"), [(16, 0.06), (128, 0.06), (512, 0.015)])
def test_the_initial_std_falls_with_the_width(d: int, std: float) -> None:
    pit = mt.PIT(2 * d, d)
    assert pit.head_weight.std().item() == pytest.approx(std, rel=0.1)
    pit.reset_parameters()
    assert pit.head_weight.std().item() == pytest.approx(std, rel=0.1)


def test_a_change_of_any_column_is_noticed() -> None:
    pit, ids = free(1.0, 500, 400), torch.arange(500)
    for column in (0, 354, 399):  # sin(355) is nearly 0
        pit.embed(ids[:1])
        with torch.no_grad():
            pit.table[:, column] *= 1.0001
        fresh = mt.PIT(500, 400)
        fresh.load_state_dict(pit.state_dict())
        assert torch.equal(pit.embed(ids), fresh.embed(ids))
