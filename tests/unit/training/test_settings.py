"""What the settings of a run may be: every number has a bound and every choice its words, in Python and on the command line."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hostile import run

from manifold_tying.training import Settings

FREE = {"preset", "data", "tokenizer", "init_from", "device", "betas"}  # words and paths; below
SAID = {"cayley_terms": "terms"}  # in other words than the setting's


def wrong(hint: Any) -> list[Any]:
    """Values that no setting of this type may have."""
    kinds = set(get_args(hint)) | {hint}
    if kinds & {int, float}:
        return [-1, *([float("nan"), float("inf")] if float in kinds else [])]
    if Literal in {get_origin(kind) for kind in kinds}:
        return ["no such"]
    return []


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings)])
def test_every_number_has_a_bound_and_every_choice_is_checked(name: str) -> None:
    hint = get_type_hints(Settings)[name]
    values = wrong(hint)
    assert values or bool in {hint, *get_args(hint)} or name in FREE
    for value in values:
        with pytest.raises(ValueError, match=SAID.get(name, name)):
            Settings(**{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "huge"}, r"nano"),
        ({"batch_size": 4, "accumulate": 3}, r"accumulate to divide batch_size=4, got 3"),
        ({"device": "meta"}, r"unknown device 'meta'; use cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, r"'cuda:99' does not exist"),
        ({"lr": 1e38}, r"expected lr <= 1e\+34, got 1e\+38"),
        ({"off_diagonal_scale": 1e300}, r"expected off_diagonal_scale <= 1e\+34, got 1e\+300; larger numbers overflow"),
        ({"vocabulary": 2 * 10**10}, r"expected vocabulary <= 2.14748e\+09, got 20000000000"),
        ({"betas": (0.9, 1.0)}, r"betas to be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
        ({"fraction": 0.0}, r"0 < fraction <= 1, got 0"),
        ({"out_share": 1.5}, r"0 <= out_share <= 1"),
        ({"block_size": 1}, r"block_size to be an integer >= 2, got 1"),
        ({"lr": "0.1"}, "expected lr to be a number, got '0.1'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["trian"], "expected a command (train, ablate, "),
        (["trian"], "got 'trian'; did you mean train?"),
        (["train", "--out", "x", "--steps", "0"], "error: expected steps >= 1, got 0"),
        (["train", "--out", "x", "--steps", "many"], "--steps"),  # in the parser's words
        (["train", "--out", "x", "--seed", str(2**64)], "expected seed < 2^64"),
        (["train", "--out", "x\0y"], "expected out to be a path"),
        (["train", "--out", "x", "--interface", "\x1b[31m"], "interface"),
        (["ablate", "--out", "x", "--data", f"text:{'long' * 30}/missing"], f"'{'long' * 30}/missing'"),  # in one piece
        (["ablate", "--out", "x", "--seeds", "1000000000"], "expected seeds <= 1000"),
        (["ablate", "--out", "x", "--arms", "untied+lr=" + "[" * 10**5], "expected lr to be of type"),
        (["report", "missing"], "missing is neither an ablation"),
        (["convert", "missing", "out"], "expected the folder of a transformers checkpoint"),
    ],
)
def test_bad_arguments_are_refused(
    command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = run(command, capsys)
    assert status == 2 and said in printed and not list(tmp_path.iterdir()), printed
