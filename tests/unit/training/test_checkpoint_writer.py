"""Checkpoints are written while training goes on: which state they hold, and how a run ends meanwhile."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from training_runs import config, lines

from manifold_tying.training import saving as saving
from manifold_tying.training import train
from manifold_tying.training.checkpoint import check_files, checkpoints, read_state
from manifold_tying.training.saving import CheckpointWriter

PATIENCE = 60  # seconds
FULL = OSError(28, "No space left on device")


@pytest.fixture
def at_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Have something called with the step of each checkpoint, just before its tensors are written."""
    real = saving.write_tensors

    def install(act: Callable[[int], None]) -> None:
        def write(draft: Path, parts: Any) -> dict[str, str]:
            act(int(draft.stem.removeprefix(".step-")))
            return real(draft, parts)

        monkeypatch.setattr(saving, "write_tensors", write)

    return install


def setter(event: Event, at: int, then: Callable[[], None] = lambda: None) -> Callable[[dict[str, Any]], None]:
    """An observer that sets the event when the metrics of a step have been written."""

    def observe(metrics: dict[str, Any]) -> None:
        if metrics["step"] == at:
            event.set()
            then()

    return observe


def whole(run: Path) -> list[int]:
    """The steps of the checkpoints, each of which is whole, with nothing beside them."""
    found = checkpoints(run)
    for path in found:
        check_files(path, read_state(path))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [path.name for path in found]
    return [int(path.name.removeprefix("step-")) for path in found]


def test_steps_go_on_and_the_state_is_that_of_its_step(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, at_writing: Any
) -> None:
    poet = {"body": "poet-block", "body_lr": 2e-3}  # the merge after step 8 changes buffers and probes in place
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "write", lambda self, stage: saving.write_checkpoint(self._run, stage()))
        train(config(tmp_path / "at once", corpus, **poet))
    gone_on = Event()

    def hold(step: int) -> None:
        assert step != 6 or gone_on.wait(PATIENCE), "no step was taken while the checkpoint was being written"

    at_writing(hold)
    train(config(tmp_path / "run", corpus, **poet), observer=setter(gone_on, 9))
    assert whole(tmp_path / "run") == whole(tmp_path / "at once") == [6, 12]
    states = [[read_state(path) for path in checkpoints(tmp_path / run)] for run in ("run", "at once")]
    assert states[0] == states[1]  # with the digests of their files
    changed = [name for name, value in states[0][0]["files"].items() if states[0][1]["files"][name] != value]
    assert len(changed) == 3  # model, optimizer and probes: there was something to mix up


@pytest.mark.parametrize(("full", "reached", "kept"), [(6, 9, [3]), (12, 12, [6, 9])])
def test_an_error_ends_the_run_at_the_next_checkpoint_or_the_end(
    full: int, reached: int, kept: list[int], tmp_path: Path, corpus: Path, at_writing: Any
) -> None:
    def fill(step: int) -> None:
        if step == full:
            raise FULL

    at_writing(fill)
    run = config(tmp_path / "run", corpus, checkpoint_every=3)
    with pytest.raises(OSError, match="No space left on device"):
        train(run)
    assert lines(run.out)[-1]["step"] == reached and whole(run.out) == kept
    assert not (run.out / "result.json").exists()
    at_writing(lambda step: None)
    train(config(run.out, corpus, checkpoint_every=3, resume=True))
    train(config(tmp_path / "whole", corpus, checkpoint_every=3))
    assert (run.out / "metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.parametrize("fails", [False, True])
def test_another_error_waits_for_the_checkpoint(fails: bool, tmp_path: Path, corpus: Path, at_writing: Any) -> None:
    gone_on = Event()

    def write_late(step: int) -> None:
        assert gone_on.wait(PATIENCE)
        time.sleep(0.3)
        if fails:
            raise FULL

    def stop() -> None:
        raise RuntimeError("something else")

    at_writing(write_late)
    with pytest.raises(RuntimeError, match="something else") as stopped:
        train(config(tmp_path, corpus), observer=setter(gone_on, 7, stop))
    assert whole(tmp_path) == ([] if fails else [6])
    notes = " ".join(getattr(stopped.value, "__notes__", []))
    assert ("checkpoint could not be written: [Errno 28] No space left" in notes) == fails


def test_sigterm_while_a_checkpoint_is_being_written(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], at_writing: Any
) -> None:
    terminated = Event()

    def hold(step: int) -> None:
        assert terminated.wait(PATIENCE)
        time.sleep(0.3)  # there is something to wait for after the step in flight, too

    at_writing(hold)
    with pytest.raises(SystemExit) as stopped:
        train(
            config(tmp_path / "run", corpus),
            observer=setter(terminated, 7, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        )
    assert stopped.value.code == 143 and "SIGTERM: saved step 7 of 12" in capsys.readouterr().out
    assert whole(tmp_path / "run") == [6, 7]
    train(config(tmp_path / "run", corpus, resume=True))
    train(config(tmp_path / "whole", corpus))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
