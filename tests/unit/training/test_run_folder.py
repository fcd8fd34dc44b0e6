"""The folder of a run: who may write to it, and what of an earlier run may stay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from training_runs import config, stop_at

from manifold_tying.training import AblateConfig, ablate, train
from manifold_tying.training.files import locked


def test_a_second_run_is_told_who_has_the_folder(tmp_path: Path, corpus: Path) -> None:
    run = config(tmp_path / "run", corpus, steps=2, checkpoint_every=None)
    folder: Any = str(run.out)  # text works as well as a Path
    experiment = AblateConfig(out=folder, arms="untied", seeds=1, settings=run.settings)
    with locked(run.out):
        for again in (lambda: train(run), lambda: ablate(experiment)):
            with pytest.raises(ValueError, match=rf"run is in use: the process {os.getpid()} writes to it"):
                again()
        assert [path.name for path in run.out.iterdir()] == [".lock"]
    train(run)


def test_a_filesystem_without_locks_lets_everybody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    with locked(tmp_path), pytest.raises(ValueError, match="in use"), locked(tmp_path):
        pass
    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_the_result_of_a_run_that_went_further_does_not_stay(tmp_path: Path, corpus: Path) -> None:
    settings = config(tmp_path, corpus).settings
    experiment = AblateConfig(out=tmp_path / "out", arms="untied", seeds=1, settings=settings)
    (before,) = ablate(experiment)
    (_, run), *_ = experiment.runs()
    with pytest.raises(KeyboardInterrupt):
        train(config(run.out, corpus, "untied", resume_from="step-00000006"), observer=stop_at(8))
    assert not (run.out / "result.json").exists()
    (after,) = ablate(experiment)  # and not a row of what is no longer there
    assert (run.out / "result.json").exists() and after["val_loss"] == before["val_loss"]


def test_a_loss_that_is_not_finite_at_the_end_is_no_success(tmp_path: Path, corpus: Path) -> None:
    for interface in ("untied", "pit-trainable"):
        run = config(tmp_path / interface, corpus, interface, steps=1, lr=1e30, checkpoint_every=None)
        said = rf"validation loss of {interface}, seed 0, is not finite after its 1 steps"
        with pytest.raises(ValueError, match=said):
            train(run)
        row = json.loads((run.out / "result.json").read_text())
        assert row["val_loss"] is None and row["tokens"] == 80
        with pytest.raises(ValueError, match="is not finite"):
            train(config(run.out, corpus, interface, steps=1, lr=1e30, checkpoint_every=None, resume=True))
