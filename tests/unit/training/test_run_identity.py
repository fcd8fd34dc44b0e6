"""A run is known again by its text, not by the name of the file that it stands in."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile import tree
from training_runs import config, text

from manifold_tying.training import AblateConfig, ablate, resolve, train
from manifold_tying.training.data import open_tokens
from manifold_tying.training.report import load_experiments
from manifold_tying.training.report.comparison import comparable, differences
from manifold_tying.training.run_data import load_data, run_data


def rewrite(corpus: Path) -> None:
    """Another text under the same name, as long as the one before."""
    corpus.write_text(corpus.read_text().replace("plus", "auch"))


def test_an_ablation_does_not_go_on_with_another_text(tmp_path: Path) -> None:
    corpus = text(tmp_path)
    settings = config(tmp_path, corpus, steps=2, checkpoint_every=None).settings
    first = AblateConfig(out=tmp_path / "out", arms="untied", seeds=1, settings=settings)
    ablate(first)
    rewrite(corpus)
    before = tree(tmp_path / "out")
    both = dataclasses.replace(first, arms="untied,transpose")
    said = r"untied-0 was trained on another text than text:.*sums\.txt is now: .*held_out"
    with pytest.raises(ValueError, match=said):
        ablate(both)
    assert tree(tmp_path / "out") == before
    path = tmp_path / "out/untied-0/config.json"  # without a text there is nothing to go on with
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "corpus"}))
    with pytest.raises(ValueError, match=said):
        ablate(both)


def test_a_run_does_not_go_on_with_another_text(tmp_path: Path) -> None:
    corpus = text(tmp_path)
    run = config(tmp_path / "run", corpus, steps=4)
    train(run)
    same = dataclasses.replace(run, resume=True)
    os.utime(corpus, (1, 1))  # prepared anew, and the same
    train(same)
    rewrite(corpus)
    before = tree(run.out)
    said = r"checkpoint .*step-00000004 was trained on another text .* Restore the text"
    with pytest.raises(ValueError, match=said):
        train(same)
    assert tree(run.out).keys() == before.keys() and tree(run.out)["metrics.jsonl"] == before["metrics.jsonl"]


def test_two_lines_that_change_places_make_another_text(tmp_path: Path) -> None:
    corpus = text(tmp_path)
    run = config(tmp_path / "run", corpus, steps=1)
    train(run)
    first, second, *rest = corpus.read_text().splitlines()
    corpus.write_text("\n".join([second, first, *rest]))
    with pytest.raises(ValueError, match=r"is now: train_sha256 differ"):
        train(dataclasses.replace(run, resume=True))


def test_runs_on_different_texts_are_not_compared(tmp_path: Path) -> None:
    corpus = text(tmp_path)
    names = ("one", "two", "other")
    for name in names:
        if name == "other":
            rewrite(corpus)
        train(config(tmp_path / name, corpus, "untied", steps=2, checkpoint_every=None))
    found = load_experiments([tmp_path / name for name in names])
    assert comparable(found) == [["one/untied", "two/untied"], ["other/untied"]]
    (sentence,) = differences(found)
    assert sentence.startswith("held-out text: 128 tokens with hash ") and "(one/untied, two/untied); " in sentence


def test_a_small_corpus_says_on_how_much_it_is_evaluated(tmp_path: Path) -> None:
    corpus = text(tmp_path)
    run = resolve(config(tmp_path / "run", corpus, val_tokens=10**6, steps=2))
    said: list[str] = []
    tokens = load_data(run, progress=said.append)
    there = (len(tokens.val) - 1) // 16 * 16
    assert said[-1] == f"text:{corpus} is small: evaluating on {there:,} held-out tokens, not on 1,000,000"
    row = train(run)
    assert row["evaluated_tokens"] == there


def test_the_held_out_text_of_a_stream_does_not_depend_on_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "corpus").mkdir()
    rows = [json.dumps({"text": f"{i} plus {i % 7} is {i + i % 7}; " * 4}) for i in range(2_000)]
    (tmp_path / "corpus/part.jsonl").write_text("\n".join(rows))
    found: list[Any] = []
    for steps in (1, 40, 400):
        run = resolve(config(tmp_path, tmp_path, data=f"hf:{tmp_path / 'corpus'}", steps=steps, val_tokens=512))
        tokens = load_data(run)
        found.append((run_data(tokens, run.settings, 0).identity, open_tokens(tokens.directory).meta.documents))
    assert [identity["evaluated_tokens"] for identity, _ in found] == [512] * 3
    assert len({identity["held_out_sha256"] for identity, _ in found}) == 1
    assert found[0][1] == found[1][1] < found[2][1] < 2_000  # and it is still read only as far as it is needed
