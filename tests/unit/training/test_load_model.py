"""Trained models back from their runs, at every checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import config, lines

from manifold_tying import diagnostics
from manifold_tying.training import checkpoints, load_model, train
from manifold_tying.training.data import validation_batches
from manifold_tying.training.evaluate import validation_loss
from manifold_tying.training.processes import Processes
from manifold_tying.training.run_data import load_data


@pytest.mark.parametrize(
    ("interface", "changes"),
    [
        ("untied", {"body": "poet-block", "body_lr": 2e-3, "merge_every": 3}),
        ("pit-trainable", {"embedding_norm": False, "retraction": "qr", "diagonal": "softplus"}),
    ],
)
def test_every_checkpoint_has_the_loss_that_was_measured(
    interface: Any, changes: dict[str, Any], tmp_path: Path, corpus: Path
) -> None:
    run = config(
        tmp_path, corpus, interface, **{"eval_every": 3, "checkpoint_every": 3, "keep_checkpoints": None, **changes}
    )
    train(run)
    measured = {line["step"]: line["val_loss"] for line in lines(tmp_path) if "val_loss" in line}
    batches = validation_batches(load_data(run).val, batch_size=5, sequence_length=16, max_tokens=128)
    found = {}
    for path in checkpoints(tmp_path):
        model: Any = load_model(path)
        step = json.loads((path / "state.json").read_text())["step"]
        found[step] = validation_loss(model.loss, batches, torch.device("cpu"), Processes())
    assert found == measured and len(set(found.values())) == 4
    newest: Any = load_model(str(tmp_path))
    assert diagnostics.delta_ti(*newest.interface.materialize()) == pytest.approx(lines(tmp_path)[-1]["delta_ti"])


@pytest.mark.parametrize(("keep", "steps"), [(1, [12]), (3, [6, 9, 12])])
def test_as_many_checkpoints_stay_as_are_asked_for(keep: Any, steps: list[int], tmp_path: Path, corpus: Path) -> None:
    train(config(tmp_path, corpus, "transpose", checkpoint_every=3, keep_checkpoints=keep))
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{step:08d}" for step in steps]


def test_a_folder_without_checkpoints_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the folder of a run with checkpoints"):
        load_model(tmp_path)
