"""Every option with every kind of bad value: an error that names it, or accepted for a reason; nothing is written."""

from pathlib import Path

import pytest
from hostile import run

VALUES = ("nan", "inf", "-inf", "-1", "0", "1e400", "text", "", "1.5", "99999999999999999999", "\0", "true", "[[[[")
WHOLE = (
    "steps", "batch-size", "sequence-length", "accumulate", "block-size", "cayley-terms", "merge-every", "retract-every",
    "warmup-steps", "eval-every", "val-tokens", "checkpoint-every", "keep-checkpoints", "lora-rank", "seeds",
)  # fmt: skip
REAL = (
    "fraction", "out-share", "lr", "equivalence-lr", "memory-lr", "transform-lr", "table-std", "weight-decay", "clip",
    "log-det-penalty", "diagonal-penalty", "timeout",
)  # fmt: skip
CHOICES = (
    "preset", "init-transform", "device", "body", "init", "diagonal", "retraction", "second-moment", "parallel", "on-nan",
    "arms", "init-from",
)  # fmt: skip
HUGE = "99999999999999999999"
NAMED = {"init-from": "transformers checkpoint", "cayley-terms": "terms"}  # in other words than the option's
# What is not an error, and why.
ZERO_IS_A_RATE = {name: {"0", "1.5", HUGE} for name in REAL if name not in ("fraction", "out-share", "timeout")}
ACCEPTED: dict[str, set[str]] = {
    **ZERO_IS_A_RATE,  # a rate, weight or norm may be any finite number >= 0
    "timeout": {"1.5", HUGE},
    "out-share": {"0"},  # R takes no part
    "warmup-steps": {"0", HUGE},  # a warm-up that never ends
    **{name: {HUGE} for name in ("steps", "sequence-length", "batch-size", "merge-every", "retract-every")},  # too much
    **{name: {HUGE} for name in ("eval-every", "val-tokens", "checkpoint-every", "keep-checkpoints")},  # never, or all
    "block-size": {HUGE},  # one block
}


@pytest.mark.parametrize("option", (*WHOLE, *REAL, *CHOICES))
@pytest.mark.parametrize("value", VALUES)
def test_a_bad_value_is_refused_by_name(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = [] if option == "arms" else ["--arms", "untied"]
    seeds = [] if option == "seeds" else ["--seeds", "1"]
    status, said = run(["ablate", "--dry-run", "--out", "out", *arms, *seeds, f"--{option}={value}"], capsys)
    assert not list(tmp_path.iterdir())
    if value in ACCEPTED.get(option, ()):
        assert status == 0 and said.startswith("manifold-tying train"), said
    else:
        assert status == 2 and len(said) > 20, said
        names = (option, option.replace("-", "_"), option.rstrip("s"), NAMED.get(option, option))
        assert any(name in said for name in names), said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "--out", "x", "--seed", str(2**64)], "expected seed < 2^64"),
        (["train", "--out", "x", "--seed", "-1"], "expected seed >= 0"),
        (["train", "--out", "x\0y"], "expected out to be a path"),
        (["train", "--out", "x", "--device", "cuda:999"], "device"),
        (["train", "--out", "x", "--device", "cuda:" + "9" * 30], "unknown device"),
        (["train", "--out", "x", "--interface", "\x1b[31m"], "interface"),
        (["ablate", "--out", "x", "--seeds", "1000000000"], "expected seeds <= 1000"),
        (["ablate", "--out", "x", "--arms", "untied+lr=" + "[" * 10**5], "expected lr to be of type"),
        (["ablate", "--out", "x", "--arms", "\x1b[31m"], "unknown arm"),
        (["reproduce", "pit-from-scratch", "--out", "x", "--seeds", "1000000000"], "expected seeds <= 1000"),
        (["reproduce", "nothing", "--out", "x"], "name"),
        (["reproduce", "pit-from-scratch", "--out", "x", "--tokens", "-1"], "expected tokens >= 1"),
        (["report", "missing"], "missing is neither an ablation"),
        (["inspect", "missing"], "expected the folder of a run, a checkpoint"),
        (["export", "missing", "out"], "missing"),
        (["convert", "missing", "out"], "expected the folder of a transformers checkpoint"),
    ],
)
def test_bad_arguments_are_refused(
    command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = run(command, capsys)
    assert status == 2 and said in printed and not list(tmp_path.iterdir()), printed
