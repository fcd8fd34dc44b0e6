"""Defects planted in code for a GPU, one of each kind, are caught on the pretended device; and what it runs beside steps."""

import copy
from pathlib import Path

import pytest
import torch
from huggingface_models import build
from pretended_device import Synchronization, no_waiting
from torch import nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.training.saving import stage_checkpoint, write_checkpoint


class Training:
    """A step that never waits, into which a defect can be planted."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pit = mt.PIT(64, 8, memory="trainable").cuda()
        self.body = mt.equivalence(nn.Linear(8, 8, device="cuda"), block_size=4)
        self.model = nn.ModuleDict({"pit": self.pit, "body": self.body})
        self.optimizer = RiemannianAdam(param_groups(self.model), lr=1e-2, fused=True)
        self.ids = torch.randint(64, (40,), device="cuda")

    def step(self, defect: str = "") -> None:
        self.optimizer.zero_grad()
        hidden, targets = self.body(self.pit.embed(self.ids)), self.ids
        if defect == "boolean mask":
            hidden, targets = hidden[targets > 3], targets[targets > 3]
        loss = self.pit.loss(hidden, targets)
        if defect == "item in a loss":
            loss = loss / (1 + loss.item())
        loss.backward()
        if defect == "tensor made in a step":
            torch.tensor([0.9, 0.999], device="cuda")
        if defect == "state on the CPU":
            self.optimizer.state[self.body.bias]["exp_avg"] = torch.zeros(8)
        self.optimizer.step()


PLANTED: dict[str, tuple[type[Exception], str]] = {
    "boolean mask": (Synchronization, "with a mask"),
    "item in a loss": (Synchronization, "_local_scalar_dense"),
    "tensor made in a step": (Synchronization, "to the device"),
    "state on the CPU": (RuntimeError, "cpu"),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_caught(defect: str) -> None:
    training, (error, message) = Training(), PLANTED[defect]
    training.step()
    with no_waiting():
        training.step()  # nothing is wrong yet
        with pytest.raises(error, match=message):
            training.step(defect)


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
