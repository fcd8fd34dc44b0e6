"""POET's clock: when it merges, what it resets, and that a resumed run cannot be told from an uninterrupted one."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying import equivalence, equivalence_, materialize
from manifold_tying.optim import MergeSchedule, RiemannianAdam, RiemannianSGD, param_groups

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "RiemannianAdam": lambda model: RiemannianAdam(param_groups(model), lr=0.02),
}


def build(optimizer: str = "AdamW", **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    equivalence_(model, exclude=(), block_size=4, terms=2, seed=3, verbose=False)
    built = OPTIMIZERS[optimizer](model)
    return model, built, MergeSchedule(model, built, **{"every": 5, "clip_ramp_steps": 2, **options})


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 4, generator=generator)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def train(run: Any, steps: range) -> list[tuple[float, bool, float]]:
    model, optimizer, schedule = run
    rows = []
    for step in steps:
        loss, norm = backward(model, optimizer, step), schedule.clip(0.1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        rows.append((loss.item(), schedule.step(), norm))
    return rows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_merges_are_due_and_leave_the_function(optimizer: str) -> None:
    model, built, schedule = build(optimizer)
    x = torch.randn(7, 6)
    for step in range(11):
        backward(model, built, step)
        built.step()
        before = model(x).detach()
        stored = [p for name, p in model.named_parameters() if name.endswith("original")]
        moments = [value for p in stored for value in built.state[p].values()]
        assert all(p.any() for p in stored) and all(value.any() for value in moments)
        merged = schedule.step()
        assert merged == (step in (4, 9))
        torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)
        for value in [*stored, *moments]:
            assert bool(value.any()) != merged
        bias = next(p for name, p in model.named_parameters() if name == "0.bias")
        assert built.state[bias]["exp_avg"].any()  # only the skew vectors' state is forgotten


def clips(steps: int, **options: Any) -> list[float]:
    """The clipping norm at each step, in thousandths of the norm asked for."""
    *_, schedule = build(**options)
    found = []
    for _ in range(steps):
        found.append(round(1000 * schedule.clip(0.1) / 0.1))
        schedule.step()
    return found


def test_clipping_norm_starts_at_a_tenth_after_a_merge_and_rises_linearly() -> None:
    """The default is the ramp of POET's own code; before the first merge nothing changes."""
    ramp = [100, 190, 280, 370, 460, 550, 640, 730, 820, 910]
    assert clips(48, every=20, clip_ramp_steps=10) == [1000] * 20 + ramp + [1000] * 10 + ramp[:8]
    model, built, _ = build()
    assert MergeSchedule(model, built, 20).clip_ramp_steps == 10
    assert clips(14, every=5) == [1000] * 5 + [100, 550, 1000, 1000, 1000] + [100, 550, 1000, 1000]


def test_clipping_norm_may_rise_after_a_merge_and_stops_changing_in_time() -> None:
    assert clips(8, every=5, clip_factor=5.0) == [1000] * 5 + [5000, 3000, 1000]
    assert clips(8, every=5, clip_ramp_steps=0) == [1000] * 8
    assert clips(17, every=5, clip_until_step=10) == [1000] * 5 + [100, 550, 1000, 1000, 1000] + [100] + [1000] * 6
    *_, schedule = build(every=1000, clip_ramp_steps=10)
    schedule.load_state_dict({"steps": 2000})
    assert schedule.clip(0.1) == pytest.approx(0.01)
    schedule.load_state_dict({"steps": 2001})
    assert schedule.clip(0.1) == 0.1


@pytest.mark.parametrize(("optimizer", "stop"), [("AdamW", 3), ("AdamW", 6), ("RiemannianAdam", 5)])
def test_resumed_is_uninterrupted(optimizer: str, stop: int) -> None:
    """Stopped before, at and after a merge."""
    model, built, schedule = build(optimizer)
    whole = train((model, built, schedule), range(13))
    first = build(optimizer)
    rows = train(first, range(stop))
    saved = copy.deepcopy([part.state_dict() for part in first])
    torch.manual_seed(99)
    again = build(optimizer)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    rows += train(again, range(stop, 13))
    assert rows == whole
    for a, b in zip(model.state_dict().values(), again[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    forgetful = build(optimizer)  # negative control: without the clock it merges at other steps
    for part, state in zip(forgetful[:2], saved[:2], strict=True):
        part.load_state_dict(state)
    assert rows[:stop] + train(forgetful, range(stop, 13)) != whole or stop % 5 == 0


def test_growing_skew_matrices_are_told_of_before_the_merge() -> None:
    model, _, schedule = build(every=8)
    vector = next(p for name, p in model.named_parameters() if name.endswith("original"))
    for step in range(8):
        with torch.no_grad():
            vector.fill_(0.1 * (step + 1))
        if step % 2:  # every quarter of the way
            with pytest.warns(UserWarning, match="lower the learning rate, merge more often"):
                assert schedule.step() == (step == 7)
        else:
            schedule.step()
    assert not vector.any()


def test_errors() -> None:
    model, built, _ = build()
    invalid: list[dict[str, Any]] = [{"every": 0}, {"every": 1.5}, {"clip_ramp_steps": -1}, {"clip_factor": 0.0}]
    invalid += [{"clip_factor": float("nan")}, {"clip_factor": float("inf")}, {"clip_until_step": -1}]
    for options in invalid:
        with pytest.raises(ValueError, match="expected"):
            MergeSchedule(model, built, **options)
    plain = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="no equivalence to merge"):
        MergeSchedule(plain, torch.optim.AdamW(plain.parameters()))
    equivalence(plain, block_size=2)
    with pytest.raises(ValueError, match="does not train weight"):
        MergeSchedule(plain, torch.optim.AdamW([plain.bias]))
    with pytest.raises(ValueError, match="no skew vector requires gradients"):
        MergeSchedule(plain.requires_grad_(False), torch.optim.AdamW(plain.parameters()))
    model, built, schedule = build(every=1)
    materialize(model)
    with pytest.raises(ValueError, match="no equivalence any more"):
        schedule.step()


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.NAdam])
def test_state_that_does_not_start_from_zeros_is_made_anew(kind: Any) -> None:
    """A step size of zero would end the training, and a product of zero would halve it."""
    model, _, _ = build()
    built = kind(model.parameters(), lr=0.01)
    schedule = MergeSchedule(model, built, every=2)
    moved = []
    vectors = [p for name, p in model.named_parameters() if name.endswith("original")]
    for step in range(5):
        backward(model, built, step)
        before = [p.detach().clone() for p in vectors]
        built.step()
        moved.append(max(float((p.detach() - q).abs().max()) for p, q in zip(vectors, before, strict=True)))
        schedule.step()
    assert moved[2] == pytest.approx(moved[0], rel=0.2) and moved[4] == pytest.approx(moved[0], rel=0.2)


def test_momentum_starts_anew_as_in_torch() -> None:
    """The first gradient is not dampened; a momentum of zero would be."""
    ends = []
    for kind in (RiemannianSGD, torch.optim.SGD):
        model, _, _ = build()
        built = kind(model.parameters(), lr=0.01, momentum=0.9, dampening=0.9)
        schedule = MergeSchedule(model, built, every=2)
        for step in range(5):
            backward(model, built, step)
            built.step()
            schedule.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # at the import
def test_moments_of_shared_out_parameters_start_anew() -> None:
    """ZeroRedundancyOptimizer has a state of its own, which is empty."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ends = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for shares in (False, True):
            model, built, _ = build()
            if shares:
                built = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02)
            train((model, built, MergeSchedule(model, built, every=2)), range(5))
            ends.append([p.detach() for p in model.parameters()])
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, *ends))
