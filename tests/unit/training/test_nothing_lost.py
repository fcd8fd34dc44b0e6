"""One process: what NaN, signals, kills and damaged files do to a run, and to the other arms of an ablation."""

import dataclasses
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import tyro
from hostile import run
from training_runs import TINY, config, lines, poison

from benchmarks.random_kills import KillOptions, random_kills
from manifold_tying.cli import main
from manifold_tying.training import AblateConfig, TrainConfig, ablate, checkpoints, train
from manifold_tying.training.processes import _mesh
from manifold_tying.training.report import findings, load_experiment, write_report


def test_nan_stops_with_step_arm_and_parameter(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 8)
    parameter = r"gradient of parameter blocks\.1\.mlp\.down\.weight holds NaN"
    with pytest.raises(ValueError, match=rf"step 8 of untied, seed 1: .*{parameter}.*continues from step-00000006"):
        train(config(tmp_path, corpus, "untied", seed=1))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000006"]


def test_nan_is_skipped_and_recorded(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(tmp_path / "clean", corpus))
    poison(monkeypatch, 3, 8)
    row = train(config(tmp_path / "run", corpus, on_nan="skip"))
    clean, metrics = lines(tmp_path / "clean"), lines(tmp_path / "run")
    assert [m["step"] for m in metrics if m.get("skipped")] == [3, 8] and metrics[2]["grad_norm"] is None
    assert metrics[:2] == clean[:2] and metrics[3]["loss"] != clean[3]["loss"]  # the third step is missing from here on
    assert row["val_loss"] < metrics[0]["loss"]


def test_too_many_skipped_steps_stop(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, *range(2, 30))
    with pytest.raises(ValueError, match=r"step 11 of pit-trainable.* for the 10th step in a row.*rate$"):
        train(config(tmp_path, corpus, on_nan="skip"))
    assert [m["step"] for m in lines(tmp_path) if not m.get("skipped")] == [1]


def test_an_arm_that_stops_does_not_end_the_others(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, corpus).settings
    experiment = AblateConfig(out=tmp_path / "out", arms="untied,transpose", seeds=1, settings=settings)
    with monkeypatch.context() as patched:
        poison(patched, 8, interface="untied")
        rows = ablate(experiment)
    assert [row["arm"] for row in rows] == ["untied", "transpose"] and rows[1]["val_loss"] > 0
    assert "step 8 of untied" in rows[0]["failed"] and json.loads((tmp_path / "out/summary.json").read_text()) == rows
    assert any("untied, seed 0, stopped before its end" in sentence for sentence in findings(rows))
    half = load_experiment(tmp_path / "out")
    assert len(half.rows) == 1
    assert "step 8 of untied" in write_report(half, tmp_path / "out").read_text()
    again = ablate(experiment)  # without the poison: from its last checkpoint to its end
    assert again[1] == rows[1] and again[0]["val_loss"] > 0


def test_the_command_says_which_arms_stopped(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, corpus)  # makes the preset
    poison(monkeypatch, 1)
    command = ["ablate", "--preset", TINY, "--data", f"text:{corpus}", "--steps", "2", "--sequence-length", "16"]
    command += ["--arms", "untied,transpose", "--seeds", "1", "--out", str(tmp_path / "out")]
    status, said = run(command, capsys)
    assert status == 2 and "untied, seed 0, stopped" in said and "transpose, seed 0, stopped" in said


def test_dry_run_prints_commands_that_do_the_same(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(
        config(tmp_path, corpus).settings, betas=(0.8, 0.9), compile=True, tokenizer=Path("a b")
    )
    arms = "pit-trainable+embedding_norm=false+body=poet-block+cayley_terms=null,transpose+lr=0.001"
    experiment = AblateConfig(out=tmp_path / "o'ut", arms=arms, seeds=2, settings=settings, dry_run=True)
    found = []
    for _, arm in experiment.runs():
        program, word, *arguments = shlex.split(arm.command())
        assert (program, word) == ("manifold-tying", "train")
        found.append(tyro.cli(TrainConfig, args=arguments, config=(tyro.conf.OmitArgPrefixes,)))
    assert found == [dataclasses.replace(run, resume=True) for _, run in experiment.runs()]
    main(["ablate", "--dry-run", "--seeds", "1", "--arms", "untied,transpose", "--out", str(tmp_path / "none")])
    assert len(capsys.readouterr().out.splitlines()) == 2 and not (tmp_path / "none").exists()


def test_a_signal_finishes_the_step_saves_and_says_so(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(tmp_path / "whole", corpus))

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        train(config(tmp_path / "run", corpus), observer=stop)
    assert stopped.value.code == 143 and "SIGTERM: saved step 3 of 12" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000003"]
    train(config(tmp_path / "run", corpus, resume=True))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_the_second_interrupt_does_not_wait_for_the_step(tmp_path: Path, corpus: Path) -> None:
    def stop(metrics: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert metrics["step"] == 1
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path, corpus), observer=stop)
    assert not checkpoints(tmp_path) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_that_are_ignored_stay_so(tmp_path: Path, corpus: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(config(tmp_path, corpus, steps=2), observer=lambda metrics: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "result.json").exists()


def test_killed_at_random_moments(tmp_path: Path) -> None:
    found = random_kills(KillOptions(kills=4, seed=1, steps=12), tmp_path)
    assert found["kills"] == 4 and found["runs"] >= 1


def test_several_processes_are_asked_for_where_there_is_one(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match="parallel=ddp does not work with 1 process; start several with torchrun"):
        train(config(tmp_path / "run", corpus, parallel="ddp"))


def test_processes_that_know_nothing_of_each_other_do_not_write_to_one_folder(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2, but torch\.distributed is not initialized"):
        train(config(tmp_path / "run", corpus))
    assert not (tmp_path / "run").exists()


def test_replicas_that_would_shard_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="an even number of processes on one; got 3"):
        _mesh("hsdp", 3, "cpu")
