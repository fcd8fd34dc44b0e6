"""Readers of foreign bytes get damaged files: a clear ValueError or a result, nothing written, memory near the file's size.

    make fuzz                      # or python -m pytest tests/fuzz.py; EXAMPLES=2000 for each reader by default

Each example damages one file of a valid folder: bytes flipped, cut out, repeated or inserted, or a value of its JSON
replaced by another. Hypothesis draws the damage and shrinks what fails.
"""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_formats import FOLDER, FORMATS
from training_runs import config, text

import manifold_tying as mt
from manifold_tying.diagnostics import inspect_tables
from manifold_tying.training import train
from manifold_tying.training.data.corpus import open_corpus
from manifold_tying.training.data.tokenize import load_tokenizer
from manifold_tying.training.report import load_experiments

EXAMPLES = int(os.environ.get("EXAMPLES", "2000"))
SAMPLES = FOLDER / mt.__version__
MEMORY = 2**30  # bytes that reading a file of some kilobytes may add
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def _jsonl(folder: Path) -> None:
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5)))


def _parquet(folder: Path) -> None:
    import pandas

    pandas.DataFrame({"text": [f"document {i}" for i in range(50)]}).to_parquet(folder / "documents.parquet")


def _run(folder: Path) -> None:
    train(config(folder, text(folder)))
    shutil.rmtree(folder / "checkpoints")


def _copied(name: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copytree(SAMPLES / name, folder, dirs_exist_ok=True)


def _documents(spec: str) -> list[str]:
    return ["".join(parts) for parts in open_corpus(spec).documents()]


# name: (makes a valid folder, reads it)
READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "checkpoint": (_copied("checkpoint"), FORMATS["checkpoint"].load),
    "tables of a checkpoint": (_copied("checkpoint"), inspect_tables),
    "converted model": (_copied("converted"), lambda folder: mt.load(folder / "model")),
    "tokens": (_copied("tokens"), FORMATS["tokens"].load),
    "tokenizer": (
        _copied("tokens"),
        lambda folder: load_tokenizer((folder / "tokens/tokenizer.json").read_bytes(), "tokenizer.json", 280),
    ),
    "jsonl": (_jsonl, lambda folder: _documents(f"jsonl:{folder}")),
    "parquet": (_parquet, lambda folder: _documents(f"parquet:{folder}")),
    "report of a run": (_run, lambda folder: load_experiments([folder])),
}


def replaced(value: Any, data: st.DataObject) -> Any:
    """The JSON value with one part of it replaced, removed or renamed."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        kept = {k: v for k, v in value.items() if k != key}
        how = data.draw(st.sampled_from(["within", "removed", "renamed"]))
        if how == "within":
            return {**value, key: replaced(value[key], data)}
        return kept if how == "removed" else {**kept, data.draw(st.text(max_size=8)): value[key]}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(value) - 1))
        return [*value[:i], replaced(value[i], data), *value[i + 1 :]]
    return data.draw(JSON)


def damaged(content: bytes, name: str, data: st.DataObject) -> bytes:
    if name.endswith((".json", ".jsonl")) and data.draw(st.booleans(), "in its structure"):
        lines = content.split(b"\n") if name.endswith(".jsonl") else [content]
        i = data.draw(st.integers(0, len(lines) - 1), "line")
        if lines[i]:
            lines[i] = json.dumps(replaced(json.loads(lines[i]), data)).encode()
            return b"\n".join(lines)
    start = data.draw(st.integers(0, len(content)), "start")
    end = data.draw(st.integers(start, min(len(content), start + 64)), "end")
    return content[:start] + data.draw(st.binary(max_size=64), "bytes") + content[end:]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", READERS)
def test_damage_is_a_value_error_and_changes_nothing(name: str, tmp_path: Path) -> None:
    make, read = READERS[name]
    make(tmp_path)
    read(tmp_path)
    whole = tree(tmp_path)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(sorted(whole)), "file")
        (tmp_path / file).write_bytes(damaged(whole[file], file, data))
        now, peak = tree(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            read(tmp_path)
        except (ValueError, RuntimeError) as error:
            # torch refuses a state dict by RuntimeError; everything else is ours
            assert isinstance(error, ValueError) or "state_dict" in str(error), repr(error)
            assert str(error)
        finally:
            changed = {key for key, content in tree(tmp_path).items() if now.get(key) != content}
            (tmp_path / file).write_bytes(whole[file])
        assert not changed
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < MEMORY
        torch.manual_seed(0)

    check()
