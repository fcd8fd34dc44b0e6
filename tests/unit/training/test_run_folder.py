"""The folder of a run: who may write to it, and what of an earlier run may stay."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import config, text

from manifold_tying.training import AblateConfig, ablate, train
from manifold_tying.training import _lock as lock
from manifold_tying.training._checkpoint import checkpoints
from manifold_tying.training._lock import locked

HOLD = "import sys, time, pathlib; from manifold_tying.training._lock import locked\nwith locked(pathlib.Path(sys.argv[1])):\n"
HOLD += "    print('held', flush=True)\n    time.sleep(600)"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text(tmp_path_factory.mktemp("corpus"))


def test_a_second_process_is_told_who_has_the_folder(
    tmp_path: Path, corpus: Path, process_environment: dict[str, str]
) -> None:
    run = config(tmp_path / "run", corpus, steps=2, checkpoint_every=None)
    experiment = AblateConfig(out=tmp_path / "run", arms="untied", seeds=1, settings=run.settings)
    command = [sys.executable, "-c", HOLD, str(run.out)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for again in (lambda: train(run), lambda: ablate(experiment)):
            with pytest.raises(ValueError, match=rf"run is in use: the process {holder.pid} writes to it"):
                again()
        assert [path.name for path in run.out.iterdir()] == [".lock"]
    finally:
        holder.send_signal(signal.SIGKILL)  # after which nothing has to be cleaned up
        holder.communicate()
    train(run)
    assert (run.out / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_filesystem_without_locks_lets_everybody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    with locked(tmp_path), pytest.raises(ValueError, match="in use"), locked(tmp_path):
        pass
    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_the_result_of_a_run_that_went_further_does_not_stay(tmp_path: Path, corpus: Path) -> None:
    settings = config(tmp_path, corpus).settings
    experiment = AblateConfig(out=tmp_path / "out", arms="untied", seeds=1, settings=settings)
    (before,) = ablate(experiment)
    (_, run), *_ = experiment.runs()

    def die(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config(run.out, corpus, "untied", resume_from="step-00000006"), observer=die)
    assert not (run.out / "result.json").exists()
    (after,) = ablate(experiment)  # and not a row of what is no longer there
    assert (run.out / "result.json").exists() and after["val_loss"] == before["val_loss"]


def test_an_ablation_recovers_from_a_damaged_checkpoint(tmp_path: Path, corpus: Path) -> None:
    settings = config(tmp_path, corpus).settings
    experiment = AblateConfig(out=tmp_path / "out", arms="untied", seeds=1, settings=settings)
    (before,) = ablate(experiment)
    run = tmp_path / "out/untied-0"
    (run / "result.json").unlink()
    (run / "checkpoints/step-00000012/model.safetensors").write_bytes(b"half")
    (after,) = ablate(experiment)
    assert "failed" not in after and after["val_loss"] == before["val_loss"]


def test_a_loss_that_is_not_finite_at_the_end_is_no_success(tmp_path: Path, corpus: Path) -> None:
    for interface in ("untied", "pit-trainable"):
        run = config(tmp_path / interface, corpus, interface, steps=1, lr=1e30, checkpoint_every=None)
        with pytest.raises(
            ValueError, match=rf"validation loss of {interface}, seed 0, is not finite after its 1 steps"
        ):
            train(run)
        row = json.loads((run.out / "result.json").read_text())
        assert row["val_loss"] is None and row["tokens"] == 80
        with pytest.raises(ValueError, match="is not finite"):
            train(config(run.out, corpus, interface, steps=1, lr=1e30, checkpoint_every=None, resume=True))


def test_ctrl_c_of_the_command_leaves_a_run_to_go_on_with(
    tmp_path: Path, corpus: Path, process_environment: dict[str, str]
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "manifold_tying", "train", "--preset", "nano", "--data", f"text:{corpus}"]
    command += [
        "--steps",
        "100000",
        "--batch-size",
        "1",
        "--sequence-length",
        "16",
        "--val-tokens",
        "32",
        "--out",
        str(out),
    ]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(
            [*command, "--eval-every", "100000", "--checkpoint-every", "5"],
            stdout=log,
            stderr=log,
            env=process_environment,
        )
    try:
        deadline = time.monotonic() + 120
        while not checkpoints(out) and started.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
    finally:
        started.kill()
        started.wait()
    said = (tmp_path / "log").read_text()
    assert "SIGINT: saved step" in said and "--resume" in said and "Traceback" not in said
    assert f"saved step {int(checkpoints(out)[-1].name.removeprefix('step-'))} of 100000" in " ".join(said.split())
