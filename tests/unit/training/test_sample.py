"""Text from the model of a run, without the corpus that it was trained on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hostile import run
from training_runs import config

from manifold_tying.training import sample, train

SENTENCE = "the quick brown fox jumps over the lazy dog; "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    text, cache = folder / "fox.txt", folder / "cache"
    text.write_text(SENTENCE * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANIFOLD_TYING_CACHE", str(cache))
        train(config(folder / "run", text, "pit-free", steps=150, eval_every=150, checkpoint_every=50, lr=2e-2))
    text.unlink()
    shutil.rmtree(cache)
    return folder / "run"


def test_a_run_on_a_repetitive_text_repeats_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = SENTENCE * 3
    text = sample(trained, SENTENCE[:19], tokens=30, temperature=0.0)
    assert len(text) > 40 and (expected.startswith(text) or text.startswith(expected))
    newest = str(trained / "checkpoints" / "step-00000150")
    words = ["sample", newest, "--prompt", SENTENCE[:19], "--tokens", "30", "--temperature", "0"]
    assert run(words, capsys) == (0, text.strip())


def test_draws_follow_the_seed(trained: Path) -> None:
    hot = [sample(trained, tokens=20, temperature=3.0, seed=seed) for seed in (0, 0, 1)]
    assert hot[0] == hot[1] != hot[2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": -1.0}, "expected temperature to be finite and >= 0, got -1.0"),
        ({"temperature": float("nan")}, "expected temperature to be finite"),
        ({"tokens": 0}, "expected tokens to be an integer >= 1"),
        ({"seed": -1}, "expected seed to be an integer >= 0"),
    ],
)
def test_what_cannot_be_sampled_is_said(options: dict[str, Any], expected: str, trained: Path) -> None:
    with pytest.raises(ValueError, match=expected):
        sample(trained, **options)


def test_a_missing_tokenizer_comes_with_advice(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing; repeat the train command with --resume"):
        sample(tmp_path / "run")
