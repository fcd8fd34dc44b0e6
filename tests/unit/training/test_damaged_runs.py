"""Damaged files of a run: refused by name with every byte as it was, or repaired with what was dropped set aside."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import run, tree
from safetensors.torch import load_file, save_file
from training_runs import TINY, config, text

from manifold_tying.training import checkpoints, load_model, train
from manifold_tying.training.checkpoint import digest_of_state
from manifold_tying.training.files import digest

Damage = Callable[[Path], object]
CHECKPOINT = "checkpoints/step-00000004"
COMMANDS = {"report": ["report", "run"], "inspect": ["inspect", "run"], "export": ["export", "run", "out"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its corpus."""
    folder = tmp_path_factory.mktemp("finished")
    train(config(folder / "run", text(folder), "untied", steps=4, checkpoint_every=2))
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def again(here: Path) -> None:
    """The run as it was."""
    shutil.rmtree(here / "run")
    shutil.copytree(here / "whole", here / "run")


def resumed(here: Path, finished: Path, **changes: Any) -> dict[str, Any]:
    options = {"steps": 4, "checkpoint_every": 2, "resume": True, **changes}
    return train(config(here / "run", finished / "sums.txt", "untied", **options))


def resume(finished: Path) -> list[str]:
    """The command that made the run, to resume."""
    sizes = {"--batch-size": 5, "--sequence-length": 16, "--val-tokens": 128, "--eval-every": 4, "--lr": 4e-3}
    others = {"--steps": 4, "--checkpoint-every": 2, "--merge-every": 4, "--block-size": 8}
    options = [str(word) for pair in {**sizes, **others}.items() for word in pair]
    command = ["train", "--out", "run", "--preset", TINY, "--interface", "untied", *options]
    return [*command, "--data", f"text:{finished / 'sums.txt'}", "--resume-from", Path(CHECKPOINT).name]


def replaced(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)


def other(make: Damage) -> Damage:
    """Something else in the place of the file."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Damage] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 3),
    "empty": replaced(b""),
    "binary": replaced(bytes(range(256))),
    "BOM": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "UTF-16": lambda path: path.write_bytes(path.read_bytes().decode("latin1").encode("utf-16")),
    "nested": replaced(b"[" * 10**5 + b"\n"),
    "list": replaced(b"[]\n"),
    "huge number": replaced(b"9" * 5000 + b"\n"),
    "NaN": replaced(b"NaN\n"),
    "no keys": replaced(b"{}\n"),
    "FIFO": other(os.mkfifo),
    "folder": other(Path.mkdir),
    "link to itself": other(lambda path: path.symlink_to(path.name)),
}


@pytest.mark.parametrize(
    ("command", "file", "named"),
    [
        ("report", "result.json", "result.json"),
        ("resume", "metrics.jsonl", "metrics.jsonl"),
        ("resume", f"{CHECKPOINT}/state.json", "step-00000004"),
        ("inspect", f"{CHECKPOINT}/model.safetensors", "step-00000004"),
    ],
)
def test_every_reader_refuses_every_damage(
    command: str, file: str, named: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "run", here / "whole")
    words = resume(finished) if command == "resume" else COMMANDS[command]
    for name, damage in DAMAGES.items():
        damage(here / "run" / file)
        before = tree(here)
        status, said = run(words, capsys)
        assert status == 2 and named in said and tree(here) == before, (name, said)
        again(here)


READ = {
    "report": ["config.json", "result.json", "run.json", "metrics.jsonl", "timing.jsonl", "probes.jsonl"],
    "resume": ["metrics.jsonl", "timing.jsonl", "probes.jsonl", *(
        f"{CHECKPOINT}/{name}" for name in ("state.json", "model.safetensors", "optimizer.safetensors", "probes.safetensors")
    )],
    "inspect": [f"{CHECKPOINT}/{name}" for name in ("state.json", "model.safetensors")],
    "export": [f"{CHECKPOINT}/{name}" for name in ("state.json", "model.safetensors", "optimizer.safetensors")],
}  # fmt: skip


@pytest.mark.parametrize("command", READ)
def test_every_file_that_a_command_reads_is_checked(
    command: str, finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "run", here / "whole")
    for file in READ[command]:
        DAMAGES["truncated"](here / "run" / file)
        before = tree(here)
        status, said = run(resume(finished) if command == "resume" else COMMANDS[command], capsys)
        assert status == 2 and (Path(file).name in said or "step-00000004" in said), (file, said)
        assert {name: of for name, of in tree(here).items() if name != "out"} == before
        again(here)


def test_what_a_run_can_write_again_is_no_reason_to_refuse(finished: Path, here: Path) -> None:
    whole = tree(here)
    loss = json.loads((here / "run/result.json").read_bytes())["val_loss"]
    for file in ("config.json", "run.json", "result.json"):
        DAMAGES["binary"](here / "run" / file)
    assert resumed(here, finished)["val_loss"] == loss
    changes = {"run/run.json", "run/result.json"}  # these say how and on what the run was called last
    assert all(tree(here)[name] == of for name, of in whole.items() if name not in changes)


# Logs


def line(number: int, change: Callable[[bytes], bytes]) -> Damage:
    """Change one line of a file."""

    def damage(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number - 1] = change(lines[number - 1])
        path.write_bytes(b"".join(lines))

    return damage


def edited(**changes: Any) -> Callable[[bytes], bytes]:
    """Change an object's values; ... drops one."""

    def edit(content: bytes) -> bytes:
        values = {**json.loads(content), **changes}
        return json.dumps({k: v for k, v in values.items() if v is not ...}).encode() + b"\n"

    return edit


LOGS: list[tuple[str, Damage, str]] = [
    ("metrics.jsonl", line(2, lambda content: b"{broken\n"), "line 2: not JSON"),
    ("metrics.jsonl", line(2, edited(step=3)), "line 2: expected a complete line of step 2"),
    ("metrics.jsonl", lambda path: path.unlink(), "has 0 of the 4 lines"),
    ("probes.jsonl", line(1, lambda content: b"{}\n"), r"probes\.jsonl, line 1: expected a complete line of step 0"),
    ("probes.jsonl", lambda path: path.unlink(), r"probes\.jsonl has 0 of the 2 lines"),
]


def test_logs_that_do_not_fit_the_checkpoint_are_refused(finished: Path, here: Path) -> None:
    whole = (here / "run").glob("*.jsonl")
    contents = {path: path.read_bytes() for path in whole}
    for file, damage, message in LOGS:
        damage(here / "run" / file)
        before = tree(here)
        with pytest.raises(ValueError, match=message):
            resumed(here, finished)
        assert tree(here) == before
        for path, content in contents.items():
            path.write_bytes(content)


def test_a_missing_evaluation_of_the_newest_step_is_measured_again(finished: Path, here: Path) -> None:
    path = here / "run/metrics.jsonl"
    before = [json.loads(entry) for entry in path.read_bytes().splitlines()]
    line(4, edited(val_loss=..., defect=..., delta_ti=..., cond_transform=...))(path)
    resumed(here, finished)
    assert [json.loads(entry) for entry in path.read_bytes().splitlines()] == before


def test_what_is_dropped_is_set_aside(finished: Path, here: Path) -> None:
    out = here / "run"
    before = {name: (out / name).read_bytes() for name in ("metrics.jsonl", "result.json")}
    for left in (b'{"half a li', b"\xff\xfe\n"):
        with (out / "metrics.jsonl").open("ab") as file:
            file.write(left)
    newest = out / CHECKPOINT / "model.safetensors"
    newest.write_bytes(damaged := newest.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"no checkpoint 'step-7'; available: step-00000002, step-00000004"):
        resumed(here, finished, resume_from="step-7")
    resumed(here, finished, resume_from="step-00000002")
    assert (out / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert (out / "aside-result.json").read_bytes() == before["result.json"]
    dropped = b"".join(before["metrics.jsonl"].splitlines(keepends=True)[2:]) + b'{"half a li\xff\xfe\n'
    assert (out / "aside-metrics.jsonl").read_bytes() == dropped
    assert (out / "checkpoints/aside-step-00000004/model.safetensors").read_bytes() == damaged
    resumed(here, finished)  # nothing to drop, nothing to add
    assert (out / "aside-metrics.jsonl").read_bytes() == dropped


# Checkpoints


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_gone_on_from(
    finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "run/metrics.jsonl").read_bytes()
    newest = here / "run" / CHECKPOINT
    (newest / "optimizer.safetensors").write_bytes((newest / "optimizer.safetensors").read_bytes()[:-1] + b"?")
    for read in (lambda: resumed(here, finished, resume_from=newest.name), lambda: load_model(newest)):
        with pytest.raises(ValueError, match=r"damaged: .*is not what was written.* --resume-from step-00000002"):
            read()
    resumed(here, finished)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.endswith("Renamed to aside-step-00000004; continuing from step-00000002")
    assert (here / "run/metrics.jsonl").read_bytes() == before
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["aside-step-00000004", "step-00000002", "step-00000004"]


def test_a_run_whose_checkpoints_are_all_damaged_starts_anew(
    finished: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "run/metrics.jsonl").read_bytes()
    for path in checkpoints(here / "run"):
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"another configuration: lr \(saved .*, now 0\.5\)"):  # nothing is renamed
        resumed(here, finished, lr=0.5)
    resumed(here, finished)
    assert (here / "run/metrics.jsonl").read_bytes() == before
    assert capsys.readouterr().out.count("continuing from the start") == 2


def test_a_file_that_was_not_saved_is_not_read(finished: Path, here: Path) -> None:
    (here / "run" / CHECKPOINT / "planted.safetensors").write_bytes(b"anything")
    with pytest.raises(ValueError, match=r"files that it was not saved with: planted\.safetensors"):
        resumed(here, finished)


def test_optimizer_state_of_another_shape_is_refused(finished: Path, here: Path) -> None:
    """As of a version that numbers parameters in another order: torch's fused kernel would write past its end."""
    checkpoint = here / "run" / CHECKPOINT
    file, state = checkpoint / "optimizer.safetensors", json.loads((checkpoint / "state.json").read_text())
    save_file({**load_file(file), "optimizer.0.exp_avg": torch.zeros(1)}, file)
    del state["digest"]
    state["files"][file.name] = digest(file)
    (checkpoint / "state.json").write_text(json.dumps({**state, "digest": digest_of_state(state)}, indent=1))
    with pytest.raises(
        ValueError, match=r"does not fit the optimizer: optimizer\.0\.exp_avg is \(1,\) in float32, not"
    ):
        resumed(here, finished)
