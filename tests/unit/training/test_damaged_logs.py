"""Resuming with damaged logs: refused with every byte as it was, or repaired with what was dropped set aside."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import config, text

from manifold_tying.training import train
from manifold_tying.training._record import Record


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Path:
    """A finished run."""
    train(config(tmp_path / "run", corpus, "untied", steps=4, checkpoint_every=2))
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def line(number: int, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
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


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "line 2": ("metrics.jsonl", line(2, lambda content: b"{broken\n"), "line 2: not JSON"),
    "a BOM": ("metrics.jsonl", line(1, lambda content: b"\xef\xbb\xbf" + content), "line 1: not JSON .*BOM"),
    "not UTF-8": ("metrics.jsonl", line(3, lambda content: b"\xff" + content), "line 3: not JSON"),
    "nested": ("metrics.jsonl", line(1, lambda content: b"[" * 10**5 + b"\n"), "line 1: not JSON .*nested too deeply"),
    "no step": ("metrics.jsonl", line(2, edited(step=...)), "line 2: expected a whole line of step 2"),
    "another step": ("metrics.jsonl", line(2, edited(step=3)), "line 2: expected a whole line of step 2"),
    "a list": ("metrics.jsonl", line(2, lambda content: b"[1]\n"), "line 2: expected a whole line of step 2"),
    "null": ("metrics.jsonl", line(2, lambda content: b"null\n"), "line 2: expected a whole line of step 2"),
    "no loss": ("metrics.jsonl", line(2, edited(loss=...)), "line 2: expected a number under 'loss', got nothing"),
    "loss null": ("metrics.jsonl", line(2, edited(loss=None)), "line 2: expected a number under 'loss', got None"),
    "loss text": ("metrics.jsonl", line(2, edited(loss="1")), "line 2: expected a number under 'loss', got '1'"),
    "loss true": ("metrics.jsonl", line(2, edited(loss=True)), "line 2: expected a number under 'loss', got True"),
    "val_loss text": ("metrics.jsonl", line(4, edited(val_loss="1")), "line 4: expected a number under 'val_loss'"),
    "no ΔTI": ("metrics.jsonl", line(4, edited(delta_ti=...)), "line 4: expected a number under 'delta_ti'"),
    "cut": ("metrics.jsonl", lambda path: path.write_bytes(b""), "has 0 of the 4 lines"),
    "gone": ("metrics.jsonl", lambda path: path.unlink(), "has 0 of the 4 lines"),
    "timing": ("timing.jsonl", line(2, lambda content: b"?\n"), r"timing\.jsonl, line 2: not JSON"),
    "seconds text": ("timing.jsonl", line(4, edited(seconds="x")), "line 4: expected a number under 'seconds'"),
    "seconds NaN": ("timing.jsonl", line(4, edited(seconds=float("nan"))), "expected a number under 'seconds'"),
    "seconds 0": ("timing.jsonl", line(4, edited(seconds=0)), "expected seconds > 0"),
    "probes": (
        "probes.jsonl",
        line(1, lambda content: b"{}\n"),
        r"probes\.jsonl, line 1: expected a whole line of step 0",
    ),
    "no probes": ("probes.jsonl", lambda path: path.unlink(), r"probes\.jsonl has 0 of the 2 lines"),
}


def test_damaged_logs_are_refused_and_nothing_is_changed(run: Path, corpus: Path) -> None:
    whole = contents(run)
    for name, (file, damage, message) in DAMAGES.items():
        damage(run / file)
        before = contents(run)
        with pytest.raises(ValueError, match=message):
            train(config(run, corpus, "untied", steps=4, checkpoint_every=2, resume=True))
        assert contents(run) == before, name
        for path, content in whole.items():
            (run / path).write_bytes(content)


def test_a_missing_evaluation_of_the_newest_step_is_measured_again(run: Path, corpus: Path) -> None:
    before = contents(run)
    line(4, edited(val_loss=..., defect=..., delta_ti=..., cond_transform=...))(run / "metrics.jsonl")
    assert train(config(run, corpus, "untied", steps=4, checkpoint_every=2, resume=True))["val_loss"] > 0
    after = contents(run)
    for name in ("metrics.jsonl", "probes.jsonl"):
        assert [json.loads(entry) for entry in after[name].splitlines()] == [
            json.loads(entry) for entry in before[name].splitlines()
        ]


def test_what_is_dropped_is_set_aside(run: Path, corpus: Path) -> None:
    before = contents(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"half a li')
    train(config(run, corpus, "untied", steps=4, checkpoint_every=2, resume_from="step-00000002"))
    after = contents(run)
    assert after["metrics.jsonl"] == before["metrics.jsonl"] and after["aside-result.json"] == before["result.json"]
    dropped = b"".join(before["metrics.jsonl"].splitlines(keepends=True)[2:]) + b'{"half a li\n'
    assert after["aside-metrics.jsonl"] == dropped
    train(config(run, corpus, "untied", steps=4, checkpoint_every=2, resume=True))  # nothing to drop, nothing to add
    assert contents(run)["aside-metrics.jsonl"] == dropped


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path, 0)
    with monkeypatch.context() as patched:

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")  # as TensorBoard's thread raises it: without a name

        patched.setattr(record._events, "add_scalar", full)
        with pytest.raises(OSError, match=rf"cannot write the logs: No space left on device: '{tmp_path}'"):
            record.write({"step": 1, "loss": 2.0}, 0.1)
    record.close()
