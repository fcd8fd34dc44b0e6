"""Every file of a finished run with every kind of damage, for every command that reads it.

A row says what is damaged and how. Afterwards the command has refused with a message that names the file, and nothing in the
folder is another; or it has recovered what can be written again; or the damage does not matter to it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import run, tree
from training_runs import TINY, config, text

from manifold_tying.training import train

CHECKPOINT = "checkpoints/step-00000002"
LOGS = ("metrics.jsonl", "timing.jsonl", "probes.jsonl")
FILES = ("config.json", "result.json", "run.json", *LOGS)
IN_CHECKPOINT = tuple(
    f"{CHECKPOINT}/{name}"
    for name in ("state.json", "model.safetensors", "optimizer.safetensors", "probes.safetensors")
)


def replaced(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def other(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in the place of the file."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


# What is damage to any file, and what only to one of text.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 3),
    "empty": replaced(b""),
    "binary": replaced(bytes(range(256))),
    "BOM": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "UTF-16": lambda path: path.write_bytes(path.read_bytes().decode("latin1").encode("utf-16")),
    "control characters": replaced(b"\x00\x1b[31m\x07\n"),
    "nested": replaced(b"[" * 10**5 + b"\n"),
    "list": replaced(b"[]\n"),
    "null": replaced(b"null\n"),
    "number": replaced(b"7\n"),
    "huge number": replaced(b"9" * 5000 + b"\n"),
    "text": replaced(b'"text"\n'),
    "NaN": replaced(b"NaN\n"),
    "no keys": replaced(b"{}\n"),
    "FIFO": other(os.mkfifo),
    "folder": other(Path.mkdir),
    "link to itself": other(lambda path: path.symlink_to(path.name)),
    "dangling link": other(lambda path: path.symlink_to("nowhere")),
}
REPORT = ["report", "run"]
RESUME = ["train", "--out", "run", "--resume", "--preset", TINY, "--interface", "untied", "--steps", "2", "--seed", "0"]
INSPECT = ["inspect", "run"]
EXPORT = ["export", "run", "out"]
# Files that a command does not read, or writes again from what it knows: any damage is accepted that lets it be written.
UNREAD = {
    "resume": {"config.json", "run.json", "result.json"},
    "inspect": {*FILES, f"{CHECKPOINT}/optimizer.safetensors", f"{CHECKPOINT}/probes.safetensors"},
    "export": set(FILES),
    "report": set(IN_CHECKPOINT),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its corpus."""
    folder = tmp_path_factory.mktemp("finished")
    corpus = text(folder)
    train(config(folder / "run", corpus, "untied", steps=2, checkpoint_every=None))
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current folder."""
    shutil.copytree(finished / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_report(file: str, damage: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGES[damage](here / "run" / file)
    before = tree(here)
    status, said = run(REPORT, capsys)
    gone = damage in ("link to itself", "dangling link") and file in ("run.json", "probes.jsonl")
    if status == 0:
        # An empty probes.jsonl is that of a run without looks at its weights; a link to nowhere is no file.
        assert gone or (file in LOGS and damage == "empty") or (file == "config.json" and damage == "no keys"), said
    else:
        assert status == 2 and file in said and tree(here) == before, said


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", LOGS)
def test_resume_with_damaged_logs(
    file: str, damage: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](here / "run" / file)
    before = tree(here)
    status, said = run(resume(finished), capsys)
    assert status == 2 and f"run/{file}" in said and tree(here) == before, said


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("FIFO", "folder", "link to itself")])
@pytest.mark.parametrize("file", sorted(UNREAD["resume"]))
def test_resume_writes_again_what_it_does_not_need(
    file: str, damage: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tree(here)
    loss = json.loads((here / "run/result.json").read_bytes())["val_loss"]
    DAMAGES[damage](here / "run" / file)
    status, said = run(resume(finished), capsys)
    assert status == 0, said
    assert json.loads((here / "run/result.json").read_bytes())["val_loss"] == loss
    # These say how and on what the run was called last.
    changes = {"run/run.json", "run/result.json"}
    assert all(tree(here)[name] == of for name, of in whole.items() if name not in changes)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", IN_CHECKPOINT)
@pytest.mark.parametrize("command", ["inspect", "export", "resume"])
def test_damaged_checkpoints(
    command: str, file: str, damage: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](here / "run" / file)
    before = tree(here)
    if command == "resume":
        status, said = run([*resume(finished)[:-1], "step-00000002"], capsys)
    else:
        status, said = run(INSPECT if command == "inspect" else EXPORT, capsys)
    if file in UNREAD[command]:
        assert status == 0, said
    else:
        assert status == 2 and "step-00000002" in said, said
    assert {k: v for k, v in tree(here).items() if not k.startswith("out")} == before
    assert status == 0 or not list(here.glob("out/*"))


def resume(finished: Path) -> list[str]:
    """The command that made the run, to resume."""
    sizes = {"--batch-size": 5, "--sequence-length": 16, "--val-tokens": 128, "--eval-every": 4, "--lr": 4e-3}
    poet = {"--merge-every": 4, "--block-size": 8}
    options = [str(word) for pair in {**sizes, **poet}.items() for word in pair]
    return [*RESUME, "--data", f"text:{finished / 'sums.txt'}", *options, "--resume-from", "step-00000002"]
