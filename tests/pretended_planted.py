"""Defects planted in code for a GPU, one of each kind, are caught on the pretended device; and what it runs beside steps."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import build
from pretended_device import Synchronization, no_waiting
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.training.saving import stage_checkpoint, write_checkpoint


class Training:
    """A step that never waits, in whose parts a defect can be planted."""

    def __init__(self) -> None:
        self.pit = mt.PIT(64, 8, memory="trainable").cuda()
        self.body = mt.equivalence(nn.Linear(8, 8, device="cuda"), block_size=4)
        self.model = nn.ModuleDict({"pit": self.pit, "body": self.body})
        self.optimizer = RiemannianAdam(param_groups(self.model), lr=1e-2, fused=True)
        self.ids = torch.randint(64, (40,), device="cuda")
        self.loss: Callable[[Tensor], Tensor] = lambda hidden: self.pit.loss(hidden, self.ids)
        self.before_step: Callable[[], Any] = lambda: None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.body(self.pit.embed(self.ids))).backward()
        self.before_step()
        self.optimizer.step()


def state_on_the_cpu(training: Training) -> None:
    state = training.optimizer.state[training.body.bias]
    state["exp_avg"] = state["exp_avg"].cpu()


def item_in_a_loss(training: Training) -> None:
    loss = training.loss
    training.loss = lambda hidden: loss(hidden) / (1 + loss(hidden).item())


def boolean_mask(training: Training) -> None:
    kept = training.ids > 3
    training.loss = lambda hidden: training.pit.loss(hidden[kept], training.ids[kept])


def tensor_made_in_a_step(training: Training) -> None:
    training.before_step = lambda: torch.tensor([0.9, 0.999], device="cuda")


PLANTED: dict[Callable[[Training], None], tuple[type[Exception], str]] = {
    state_on_the_cpu: (RuntimeError, "cpu"),
    item_in_a_loss: (Synchronization, "_local_scalar_dense"),
    boolean_mask: (Synchronization, "with a mask"),
    tensor_made_in_a_step: (Synchronization, "to the device"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_caught(plant: Callable[[Training], None]) -> None:
    torch.manual_seed(0)
    training, (error, message) = Training(), PLANTED[plant]
    training.step()
    with no_waiting():
        training.step()  # nothing is wrong yet
    plant(training)
    with no_waiting(), pytest.raises(error, match=message):
        training.step()


def test_a_copy_that_nobody_waits_for_has_not_arrived() -> None:
    x = torch.ones(3, device="cuda")
    y = x.to("cpu", non_blocking=True)
    assert y.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.ones(3))


def test_merge_project_checkpoint_and_conversion(tmp_path: Path) -> None:
    """What happens between steps may wait; it must not mix devices."""
    training = Training()
    training.step()
    before = training.body.weight.detach().cpu()
    mt.merge(training.model)
    torch.testing.assert_close(training.body.weight.detach().cpu(), before)
    mt.project(training.model)
    write_checkpoint(tmp_path, stage_checkpoint(1, training.model, training.optimizer, {}))
    state = copy.deepcopy(training.model.state_dict())
    training.step()
    training.model.load_state_dict(state)
    torch.testing.assert_close(training.body.weight.detach().cpu(), before)
    model = mt.convert(build().cuda())
    ids = torch.arange(8, device="cuda")[None]
    model(ids, labels=ids).loss.backward()
    plain = mt.materialize(training.body)
    assert plain.weight.is_cuda and plain.weight.shape == plain.weight.cpu().shape == (8, 8)
