"""What the command line says: its own words where something is wrong, and no comparison that the page would not make."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import run
from training_runs import TINY, config

from manifold_tying.cli import main
from manifold_tying.training import train


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "[Errno 28] No space left on device: 'runs/x'"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/cache"),
            "[Errno 13] Permission denied: '/cache'. Change its permissions, or choose another path; "
            "MANIFOLD_TYING_CACHE moves prepared corpora",
        ),
    ],
)
def test_what_the_system_refuses_is_said(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise error

    monkeypatch.setattr("manifold_tying.training.commands.run_train", refused)
    assert run(["train", "--out", "runs/x"], capsys) == (2, f"error: {said}")


def test_the_comparisons_need_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no part of the package, as its distributions show."""
    monkeypatch.setattr("manifold_tying.cli.__file__", str(tmp_path / "manifold_tying/cli.py"))
    status, said = run(["reproduce", "--help"], capsys)
    assert status == 2 and "in a checkout" in said


def test_an_encoding_without_greek_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "--help"])


def test_a_run_is_not_converted(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path / "run", corpus, "transpose", steps=1))
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints/step-00000001"):
        status, said = run(["convert", str(folder), str(tmp_path / "out")], capsys)
        assert status == 2 and f"{folder} is a run of train or ablate" in said and "export for runs" in said


def test_options_without_effect_are_said(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--preset", TINY, "--data", f"text:{corpus}", "--steps", "1", "--interface", "transpose"]
    _, said = run([*command, "--memory-lr", "3", "--lr", "0.01", "--out", str(tmp_path / "run")], capsys)
    assert "note: this transpose run does not use memory_lr" in said


def test_a_small_corpus_is_refused_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.txt").write_text("a few words, and then some more of them. " * 20)
    command = ["ablate", "--preset", TINY, "--data", f"text:{tmp_path / 'small.txt'}", "--sequence-length", "512"]
    command += ["--arms", "untied,transpose,pit-frozen", "--out", str(tmp_path / "out")]
    status, said = run(command, capsys)
    assert status == 2 and said.count("use a larger corpus") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "ablate"])
def test_the_folder_is_checked_before_the_corpus_is_prepared(
    command: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANIFOLD_TYING_CACHE", str(tmp_path / "cache"))
    somebodys, settings = tmp_path / "somebodys", ["--preset", TINY, "--data", f"text:{corpus}", "--out"]
    somebodys.mkdir()
    for name in ("config.json", "experiment.json"):
        (somebodys / name).write_text("{}")
    for out, expected in ((corpus / "out", "is not a folder"), (somebodys, "not a file that manifold-tying wrote")):
        status, said = run([command, *settings, str(out)], capsys)
        assert status == 2 and expected in said and "choose" in said
    assert {path.read_text() for path in somebodys.iterdir()} == {"{}"}
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    status, said = run([command, *settings, str(tmp_path / "new" / "out")], capsys)
    assert status == 2 and f"{tmp_path} is read-only for you; choose a folder that is writable" in said
    assert not (tmp_path / "cache").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("use", ["import manifold_tying", "from manifold_tying.cli import main; main(['--help'])"])
def test_what_is_not_used_is_not_imported(use: str, process_environment: dict[str, str]) -> None:
    program = f"import sys; {use}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=process_environment, check=True
    )
    slow = {"torch", "scipy", "geoopt", "matplotlib", "tensorboard", "tokenizers", "transformers", "datasets"}
    slow |= {"pandas", "plotly", "jinja2"}
    assert not slow & set(done.stdout.splitlines()[-1].split())


def test_the_terminal_compares_what_the_page_compares(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config(tmp_path, tmp_path)
    other = tmp_path / "other.txt"
    shutil.copy(corpus, other)
    other.write_text(other.read_text().replace("plus", "and"))
    command = ["ablate", "--preset", TINY, "--data", f"text:{corpus}", "--steps", "2", "--sequence-length", "16"]
    command += ["--val-tokens", "64", "--seeds", "1", "--arms", f"untied,transpose,untied+data=text:{other}"]
    main([*command, "--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("they cannot be compared across: - data: text:") < said.index("Mean over seeds")
    rows = json.loads((tmp_path / "out/summary.json").read_text())
    assert len({row["held_out_sha256"] for row in rows}) == 2
    apart = f"untied+data=text:{other}"
    assert f"{apart}: validation loss" in said and "There is no other arm to compare it with" in said
    assert len(re.findall(r"lowest", said)) == 1  # of untied and transpose


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As in ``manifold-tying --help | head -1``."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "manifold_tying", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""
