"""What is said and done where a PIT interface loses W_out E = I: in the run, in the report, by inspect."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import run
from made_up import write_experiment
from training_runs import TINY, config, lines

import manifold_tying as mt
from manifold_tying import diagnostics
from manifold_tying.cli import main
from manifold_tying.training import checkpoints, resolve, train
from manifold_tying.training.evaluate import health_warnings
from manifold_tying.training.report import load_experiment
from manifold_tying.training.report.findings import health


@pytest.mark.parametrize("decades", [3, 9])
def test_the_condition_comes_from_the_factor(decades: int) -> None:
    rng = np.random.default_rng(decades)
    U, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    # T = U D Uᵀ with cond 10^decades; its factor from a QR of D^(1/2) Uᵀ, which squares nothing
    R = np.linalg.qr(np.diag(10.0 ** np.linspace(0, -decades / 2, 12)) @ U.T)[1]
    L = torch.from_numpy((np.sign(np.diag(R))[:, None] * R).T.copy())
    assert diagnostics.condition_from_factor(L) == pytest.approx(10.0**decades, rel=1e-5)
    assert diagnostics.condition_from_factor(torch.zeros(3, 3)) == torch.inf
    pit = mt.PIT(20, 12, memory="frozen")
    pit.cholesky_factor = L.float()
    assert diagnostics.condition_from_factor(pit.cholesky_factor) == pytest.approx(10.0**decades, rel=2e-2)


def test_a_run_that_loses_the_interface_stops_and_keeps_its_checkpoint(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, corpus)
    command = ["train", "--preset", TINY, "--data", f"text:{corpus}", "--steps", "12", "--batch-size", "5"]
    command += ["--sequence-length", "16", "--val-tokens", "128", "--eval-every", "4", "--checkpoint-every", "2"]
    command += ["--lr", "0.004", "--transform-lr", "1.0", "--off-diagonal-scale", "1.0", "--out", str(tmp_path / "out")]
    status, said = run(command, capsys)
    assert status == 2 and "step 4 of pit-trainable, seed 0: the token interface is lost" in said
    assert "--transform-lr, here 1)" in said and "step-00000002 is kept" in said
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["step-00000002"]
    assert not (tmp_path / "out/result.json").exists()
    seen = lines(tmp_path / "out")
    assert len(seen) == 4 and seen[-1]["delta_ti"] > 1 and seen[-1]["cond_transform"] > 1e6


def test_a_lost_free_table_is_said_to_need_a_lower_rate_of_its_own(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manifold_tying.training.evaluate.LOST_DELTA_TI", 0.0)  # a table of this size is never lost
    rate = resolve(config(tmp_path, corpus, "pit-free")).settings.table_lr
    with pytest.raises(ValueError, match=rf"rate of the free table \(--table-lr, here {rate:g}\)"):
        train(config(tmp_path, corpus, "pit-free"))


def test_a_run_warns_once_of_each_quantity_and_so_do_the_report_and_inspect(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far below what this run reaches: past 1e-2 its rounding, and so the machine, decides whether the interface is lost.
    monkeypatch.setattr("manifold_tying.training.evaluate.LARGEST_DELTA_TI", 1e-5)
    out = tmp_path / "run"
    with pytest.warns(RuntimeWarning) as warned:
        train(config(out, corpus, "pit-frozen", transform_lr=0.3, off_diagonal_scale=1.0))
    said = [str(one.message) for one in warned]
    assert len(said) == 2
    assert "step 4 of pit-frozen, seed 0: cond(T) is" in said[0] and "above 1000" in said[0]
    assert "ΔTI = ‖W_out E - I‖ is" in said[1] and "above 1e-05" in said[1]
    for command in ("report", "inspect"):
        main([command, str(out)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Warning: cond(T) is" in shown and "above 1000: W_out E = I loses digits" in shown
    page = (out / "report.html").read_text()
    assert "pit-frozen, seed 0, at its worst evaluation: cond(T) is" in page and "above 1e-05" in page


def test_the_bound_of_delta_ti() -> None:
    assert not health_warnings({"cond_transform": 10.0, "delta_ti": 0.009})
    lost = {"cond_transform": 10.0, "delta_ti": 0.011}
    assert "is 0.011, above 0.01" in health_warnings(lost)["delta_ti"]


def test_a_healthy_run_is_not_warned_of(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path / "run", corpus))  # a warning would be an error
    main(["inspect", str(tmp_path / "run")])
    assert "Warning" not in capsys.readouterr().out and not health(load_experiment(tmp_path / "run"))


def test_the_report_names_a_lost_interface_and_no_tables_without_one(tmp_path: Path) -> None:
    write_experiment(tmp_path, arms=("transpose", "pit-frozen"), seeds=[0])
    path = tmp_path / "pit-frozen-0/metrics.jsonl"
    entries = lines(path.parent)
    entries[-1] |= {"cond_transform": 1.3e10, "delta_ti": 1e10}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    said = health(load_experiment(tmp_path))
    assert any("pit-frozen, seed 0, at its worst evaluation: cond(T) is 1.3e+10" in one for one in said)
    assert not any("transpose, seed 0, at its worst" in one for one in said)
