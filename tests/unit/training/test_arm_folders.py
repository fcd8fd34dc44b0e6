"""Arms and paths as users name them: no folder outside --out, no markup, no arm that is trained twice."""

import json
import re
from pathlib import Path

import pytest
from training_runs import TINY, config

from manifold_tying.cli import main
from manifold_tying.training import AblateConfig, Settings, train
from manifold_tying.training.report import load_experiment, load_experiments


def command(name: str, out: str, corpus: Path) -> list[str]:
    shared = [name, "--preset", TINY, "--data", f"text:{corpus}", "--steps", "1", "--batch-size", "2", "--out", out]
    return [*shared, "--sequence-length", "16", "--val-tokens", "32"]


def test_no_arm_leaves_the_folder_and_none_shares_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, corpus)
    here = tmp_path / "a/b/c"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("x3.txt", "x4.txt"):
        (tmp_path / name).write_text(corpus.read_text())
    arms = ["untied", "untied+data=text:../../../x3.txt", "untied+data=text:../../../x4.txt"]
    main([*command("ablate", "inner", corpus), "--arms", ",".join(arms), "--seeds", "1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "x3.txt", "x4.txt"]
    assert [path.name for path in here.iterdir()] == ["inner"]
    assert [path.name for path in here.parent.iterdir()] == ["c"]
    runs = [path.parent for path in sorted(here.glob("inner/*/metrics.jsonl"))]
    assert len(runs) == 3 and here / "inner/untied-0" in runs
    assert sorted(json.loads((run / "config.json").read_text())["arm"] for run in runs) == sorted(arms)
    assert [row["arm"] for row in json.loads((here / "inner/summary.json").read_text())] == arms
    assert len(load_experiment(here / "inner").runs) == 3 and (here / "inner/report.html").exists()


def test_folders_of_plain_arms_are_called_after_them(tmp_path: Path, corpus: Path) -> None:
    arms = ["transpose", "pit-trainable+lr=0.002+second_moment=row", "poet-block"]
    experiment = AblateConfig(out=tmp_path, arms=",".join(arms), seeds=1, settings=config(tmp_path, corpus).settings)
    assert [run.out.name for _, run in experiment.runs()] == [f"{arm}-0" for arm in arms]


def test_names_are_not_markup(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, corpus)
    name = "m[/x][final]:x:"
    monkeypatch.chdir(tmp_path)
    main(command("train", name, corpus))
    assert f"written to {name}\n" in capsys.readouterr().out and (tmp_path / name / "result.json").exists()
    main(["inspect", name])
    main(["report", name])
    said = capsys.readouterr().out
    assert said.count(name) == 2 and f"report: {name}/report.html" in said


@pytest.mark.parametrize(
    ("preset", "arms", "twice"),
    [
        ("mini", "transpose,pit-trainable,pit-trainable+lr=0.002", ("pit-trainable", "pit-trainable+lr=0.002")),
        ("nano", "untied,adamw", ("untied", "adamw")),
    ],
)
def test_arms_that_resolve_alike_are_refused(preset: str, arms: str, twice: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{twice[0]!r} and {twice[1]!r} have the same settings")):
        AblateConfig(out=tmp_path / "out", arms=arms, settings=Settings(preset=preset))
    assert not (tmp_path / "out").exists()


def test_the_report_counts_the_tokens_that_were_evaluated(tmp_path: Path, corpus: Path) -> None:
    """A small corpus holds out fewer tokens than were asked for; two wishes that it cannot meet are the same."""
    folders = [tmp_path / name for name in ("million", "two-million", "few")]
    for folder, wanted in zip(folders, (10**6, 2 * 10**6, 64), strict=True):
        train(config(folder, corpus, "untied", steps=1, batch_size=64, val_tokens=wanted))
    million, two, few = (json.loads((folder / "result.json").read_text())["evaluated_tokens"] for folder in folders)
    assert million == two and few == 64 < million < 10**6
    assert load_experiment(folders[0]).settings["val_tokens"] == million
    alike, apart = load_experiments(folders[:2]), load_experiments(folders[1:])
    assert alike.settings["val_tokens"] == million
    main(["report", *map(str, folders[:2]), "--out", str(tmp_path / "alike")])
    page = (tmp_path / "alike/report.html").read_text()
    assert "cannot be compared" not in page and f"<dd>{million}</dd>" in page and "<dd>1000000</dd>" not in page
    assert {own["val_tokens"] for own in apart.arms.values()} == {million, 64}


@pytest.mark.parametrize("arm", ["pit-frozen+memory_lr=0.1", "transpose+transform_lr=0.1", "adamw+block_size=16"])
def test_a_setting_that_an_arm_does_not_use_is_refused(arm: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{arm.partition('+')[0]} does not use {arm.partition('+')[2][:6]}"):
        AblateConfig(out=tmp_path, arms=arm)
