"""A signal in the last step, in an evaluation or after everything is done: the run and its ablation stop, nothing is lost."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from training_runs import STEPS, config, lines

from manifold_tying.training import AblateConfig, ablate, loop, train
from manifold_tying.training.build import build_model
from manifold_tying.training.evaluate import evaluate


def experiment(out: Path, corpus: Path, **changes: Any) -> AblateConfig:
    settings = config(out, corpus, **changes).settings
    return AblateConfig(out=out, arms="transpose,untied", seeds=1, settings=settings)


def interrupt_backward(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGINT within the backward pass of this step, in every run."""
    real = build_model

    def built(run: Any) -> Any:
        model, calls = real(run), [0]

        def send(grad: Any) -> None:
            calls[0] += 1
            if calls[0] == step:
                os.kill(os.getpid(), signal.SIGINT)

        next(p for name, p in model.named_parameters() if "blocks.1" in name and p.requires_grad).register_hook(send)
        return model

    monkeypatch.setattr(loop, "build_model", built)


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_resumed_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"body": "poet-block", "body_lr": 2e-3}
    both = experiment(tmp_path / "out", corpus, **changes)
    with monkeypatch.context() as patched:
        interrupt_backward(patched, STEPS)
        with pytest.raises(SystemExit) as stopped:
            ablate(both)
    assert stopped.value.code == 130 and not (tmp_path / "out/untied-0").exists()
    said = capfd.readouterr()
    assert "SIGINT: finishing the step" in said.err and f"saved step {STEPS} of {STEPS}, whose evaluation" in said.out
    cut = lines(tmp_path / "out/transpose-0")
    assert len(cut) == STEPS and "val_loss" not in cut[-1] and "val_loss" in cut[7]
    assert ablate(both)[0]["val_loss"] > 0
    train(config(tmp_path / "whole", corpus, "transpose", **changes))
    for name in ("metrics.jsonl", "probes.jsonl"):
        assert (tmp_path / "out/transpose-0" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_signal_after_the_last_evaluation_stops_before_the_next_arm(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = experiment(tmp_path / "out", corpus)
    trained: list[str] = []

    def started(name: str, index: int, count: int) -> Any:
        trained.append(name)
        return lambda metrics: os.kill(os.getpid(), signal.SIGTERM) if metrics["step"] == STEPS else None

    with pytest.raises(SystemExit) as stopped:
        ablate(both, started=started)
    assert stopped.value.code == 143 and trained == ["transpose-0"]
    assert (tmp_path / "out/transpose-0/result.json").exists()
    assert f"SIGTERM: the run in {tmp_path / 'out/transpose-0'} is complete" in capsys.readouterr().out
    assert [row["arm"] for row in ablate(both)] == ["transpose", "untied"]


def test_an_evaluation_that_is_cut_short_again(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first resumed run is interrupted before it has made up for the evaluation."""
    with monkeypatch.context() as patched:
        interrupt_backward(patched, 4)  # followed by an evaluation
        with pytest.raises(SystemExit):
            train(config(tmp_path / "run", corpus))
    real = evaluate

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", interrupted)
        with pytest.raises(SystemExit) as stopped:
            train(config(tmp_path / "run", corpus, resume=True))
    assert stopped.value.code == 130 and "val_loss" not in lines(tmp_path / "run")[-1]
    train(config(tmp_path / "run", corpus, resume=True))
    train(config(tmp_path / "whole", corpus))
    for name in ("metrics.jsonl", "probes.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
