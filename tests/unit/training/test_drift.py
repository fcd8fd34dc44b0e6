"""The distance of weights from their manifolds, and the Trainer's log of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import Repeated, arguments, build
from torch import nn
from transformers import Trainer, TrainerCallback

import manifold_tying as mt
from manifold_tying.optim import RiemannianSGD, drift
from manifold_tying.parametrizations import parametrized


class Report(TrainerCallback):
    """Notes what a report such as TensorBoard's gets: it stands before the callbacks that are added later."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_log(self, *_: Any, **parts: Any) -> None:
        self.seen.append(set(parts["logs"]))


def test_drift_is_the_relative_distance_to_the_nearest_point() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        mt.stiefel(nn.Linear(6, 9)), mt.orthogonal(nn.Linear(9, 9)), mt.low_rank(nn.Linear(9, 9), rank=3)
    )
    model.append(mt.equivalence(nn.Linear(9, 8), block_size=4, terms=1))
    assert drift(model).keys() == {"0.weight", "2.weight", "3.weight"} and max(drift(model).values()) < 1e-6
    with torch.no_grad():
        parametrized(model[0])["weight"].original.mul_(1.25)
        for name in ("original0", "original1"):
            getattr(parametrized(model[2])["weight"], name).mul_(1.25)
        parametrized(model[3])["weight"].original.zero_()[0] = 0.5  # G = (I + A)², so GᵀG = (1 + a²)² I in a plane
    expected = {"0.weight": 0.2, "2.weight": 0.2 * 2**0.5, "3.weight": 1.25**2 - 1}
    assert drift(model) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        parametrized(model[0])["weight"].original[0, 0] = math.nan
    assert drift(model)["0.weight"] == math.inf


def test_what_has_no_distance_is_infinitely_far() -> None:
    zero, huge = mt.sphere(nn.Linear(8, 4)), mt.stiefel(nn.Linear(4, 8))
    turned = mt.equivalence(nn.Linear(8, 8), block_size=4, terms=2)
    with torch.no_grad():
        parametrized(zero)["weight"].original[1] = 0
        parametrized(huge)["weight"].original.mul_(1e20)  # whose squares overflow
        parametrized(turned)["weight"].original[0] = math.nan
    assert drift(nn.Sequential(zero, huge, turned)) == dict.fromkeys(("0.weight", "1.weight", "2.weight"), math.inf)
    for constrain in (mt.stiefel, mt.equivalence):
        with torch.device("meta"):
            unknown = constrain(nn.Linear(8, 8))
        with pytest.raises(ValueError, match=r"0\.weight are on the meta device"):
            drift(nn.Sequential(unknown))


def trained(out: Path, follows: bool, resume: str | None = None) -> tuple[list[float], Report]:
    """Logged drift of eight steps of a Llama whose first projection is orthonormal, and what a report saw."""
    model, report = build().train(), Report()
    mt.stiefel(model.model.layers[0].mlp.up_proj)
    optimizer: Any = (
        RiemannianSGD(model.parameters(), lr=0.1) if follows else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    settings = arguments(out, 8)
    settings.logging_steps = 2
    trainer = Trainer(model, settings, train_dataset=Repeated(), callbacks=[report], optimizers=(optimizer, None))
    trainer.add_callback(mt.optim.DriftCallback(trainer))
    trainer.train(resume_from_checkpoint=resume)
    rows = trainer.state.log_history
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8]
    assert [row["step"] for row in rows if "drift" in row] == [2, 4, 6, 8]
    return [row["drift"] for row in rows if "drift" in row], report


@pytest.mark.filterwarnings("ignore:torch.optim.sgd.SGD moved")
def test_the_trainer_logs_drift_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    found, report = trained(tmp_path / "ours", follows=True)
    assert max(found) < 1e-6
    assert sum("drift" in logs for logs in report.seen) == 4 and sum("loss" in logs for logs in report.seen) == 4
    left, _ = trained(tmp_path / "plain", follows=False)
    assert left[0] > 1e-4 and left == sorted(left)
    saved = json.loads((tmp_path / "plain" / "checkpoint-5" / "trainer_state.json").read_text())
    assert [row["drift"] for row in saved["log_history"] if "drift" in row] == left[:2]
    resumed, _ = trained(tmp_path / "plain", follows=False, resume=str(tmp_path / "plain" / "checkpoint-5"))
    assert resumed == pytest.approx(left, rel=1e-4)


def test_a_model_that_cannot_drift_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(build(), arguments(tmp_path, 1), train_dataset=Repeated())
    trainer.add_callback(mt.optim.DriftCallback(trainer))
    with pytest.raises(ValueError, match="no weight that can drift"):
        trainer.train()
