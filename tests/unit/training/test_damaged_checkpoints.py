"""Checkpoints whose parts disagree, with digests that say otherwise: refused before torch's kernels see them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import config, text

from manifold_tying.training import train
from manifold_tying.training._checkpoint import checkpoints, digest_of_state
from manifold_tying.training._files import digest

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text(tmp_path_factory.mktemp("corpus"))


def sign(checkpoint: Path, change: Callable[[dict[str, Any]], object] = lambda state: None) -> None:
    """Give a checkpoint that was changed the digests of its files, as somebody who knows them would."""
    state = json.loads((checkpoint / "state.json").read_text())
    state.pop("digest")
    state["files"] = {name: digest(checkpoint / name) for name in state["files"]}
    change(state)
    (checkpoint / "state.json").write_text(json.dumps({**state, "digest": digest_of_state(state)}, indent=1))


def first(tensors: Tensors, key: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(key) and tensors[name].ndim == 2)


def reshaped(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    def damage(tensors: Tensors) -> None:
        name = first(tensors, key)
        tensors[name] = change(tensors[name]).contiguous()

    return damage


STATES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "one number": (reshaped("exp_avg_sq", lambda t: t.new_zeros(1)), r"exp_avg_sq is \(1,\) in float32, not \("),
    "transposed": (reshaped("exp_avg", lambda t: t.T), "exp_avg is"),
    "half the rows": (reshaped("exp_avg", lambda t: t[: len(t) // 2]), "exp_avg is"),
    "twice the columns": (reshaped("exp_avg_sq", lambda t: torch.cat([t, t], 1)), r"exp_avg_sq is \(\d+, \d+\)"),
    "float64": (reshaped("exp_avg", lambda t: t.double()), "exp_avg is .* in float64, not .* in float32"),
    "integers": (reshaped("exp_avg", lambda t: t.long()), "exp_avg is .* in int64"),
    "steps of a vector": (
        lambda t: t.update({"optimizer.0.step": torch.ones(4)}),
        r"step is \(4,\) in float32, not \(\)",
    ),
    "no moment": (lambda t: t.pop("optimizer.0.exp_avg"), "exp_avg is missing, not"),
    "another moment": (lambda t: t.update({"optimizer.0.max": torch.ones(2)}), r"optimizer\.0\.max is \(2,\)"),
    "another parameter": (lambda t: t.update({"optimizer.99.step": torch.ones(())}), r"optimizer\.99\.step is"),
    "no number": (lambda t: t.update({"optimizer.x.step": torch.ones(())}), r"optimizer\.x\.step is"),
    "no key": (lambda t: t.update({"optimizer.0": torch.ones(())}), r"optimizer\.0 is"),
}


@pytest.mark.parametrize("second_moment", ["element", "row"])
def test_optimizer_state_of_another_shape_is_refused(tmp_path: Path, corpus: Path, second_moment: str) -> None:
    """Some of these ended the process: torch's fused kernel reads and writes past the end of a state that is too small."""
    options = {"steps": 2, "checkpoint_every": None, "second_moment": second_moment}
    train(config(tmp_path, corpus, **options))
    file = (checkpoint := checkpoints(tmp_path)[-1]) / "optimizer.safetensors"
    whole = file.read_bytes()
    for name, (damage, message) in STATES.items():
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)
        sign(checkpoint)
        with pytest.raises(ValueError, match=rf"checkpoint .*step-00000002 does not fit the optimizer: .*{message}"):
            train(config(tmp_path, corpus, resume=True, **options))
        file.write_bytes(whole)
        assert name
    sign(checkpoint)
    train(config(tmp_path, corpus, resume=True, **options))  # what is whole is read


CONTENTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "fewer groups": (lambda state: state["param_groups"].pop(), "does not fit the optimizer: expected groups of"),
    "no groups": (lambda state: state.pop("param_groups"), "does not fit the optimizer: .* found None"),
    "groups of another size": (lambda state: state["param_groups"][0]["params"].pop(), "expected groups of"),
    "step": (lambda state: state.update(step="2"), "expected 'step' to be int, found '2'"),
    "no step": (lambda state: state.pop("step"), "expected 'step' to be int, found None"),
    "config": (lambda state: state.update(config=[]), r"expected 'config' to be dict, found \[\]"),
    "files": (lambda state: state.update(files=None), "expected 'files' to be dict, found None"),
    "no schedule": (lambda state: state.update(schedule=None), "expected 'schedule' to be"),
    "empty schedule": (lambda state: state.update(schedule={}), "expected 'schedule' to be"),
}


def test_a_state_that_fits_nothing_is_refused(tmp_path: Path, corpus: Path) -> None:
    options = {"steps": 2, "checkpoint_every": None, "body": "poet-block"}
    train(config(tmp_path, corpus, "untied", **options))
    state = (checkpoint := checkpoints(tmp_path)[-1]) / "state.json"
    whole = state.read_bytes()
    for change, message in CONTENTS.values():
        sign(checkpoint, change)
        with pytest.raises(ValueError, match=message):
            train(config(tmp_path, corpus, "untied", resume_from=checkpoint.name, **options))
        state.write_bytes(whole)
