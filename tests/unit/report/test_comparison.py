"""`manifold-tying report DIR...` over ablations and single runs."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hostile import run, tree
from made_up import OTHER_TEXT, Page, with_losses, write_experiment
from training_runs import config, text

from manifold_tying.cli import main
from manifold_tying.training import train
from manifold_tying.training.report import load_experiment, load_experiments
from manifold_tying.training.report.comparison import comparable, differences, names_of
from manifold_tying.training.report.load import interface_of
from manifold_tying.training.report.tables import results


def describe(folder: Path, **changes: Any) -> None:
    """Change what an ablation says of itself."""
    path = folder / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two ablations, made up, and a real run."""
    root = tmp_path_factory.mktemp("runs")
    found = {name: root / name for name in ("first", "second", "run")}
    shared = {"preset": "nano", "data": "stdlib", "val_tokens": 128, "sequence_length": 16, "steps": 80}
    for name, arms in (("first", ("untied", "transpose")), ("second", ("transpose", "pit-trainable"))):
        write_experiment(found[name], arms=arms)
        describe(found[name], settings=shared, command=f"manifold-tying ablate --out '{name} <&'")
    train(config(found["run"], text(root), seed=3))
    return found


def test_arms_of_several_folders_carry_their_names(folders: dict[str, Path], tmp_path: Path) -> None:
    main(["report", str(folders["first"]), str(folders["second"]), "--out", str(tmp_path / "out")])
    page = Page(tmp_path / "out" / "report.html")
    arms = ["first/untied", "first/transpose", "second/transpose", "second/pit-trainable"]
    assert [row[0] for row in page.tables[0][1:]] == [[arm] for arm in arms]
    shown = "".join(page.text)
    assert "Comparison of 2 folders" in shown and "cannot be compared" not in shown
    for name in ("first", "second"):
        assert f"manifold-tying ablate --out '{name} <&'" in shown, "every command, as it was"
    assert {one["name"] for one in page.data()[0]["data"]} == set(arms)
    # what both share is said once, the rest arm by arm
    assert "stdlib" in shown and [row[0] for row in page.tables[-1][1:]] == [["memory lr"]]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


def test_the_difference_is_to_one_arm_where_losses_can_be_compared() -> None:
    rows: Any = with_losses({"a/transpose": [4.0], "a/untied": [4.5], "b/transpose": [5.0], "b/untied": [5.2]})
    groups = [["a/transpose", "a/untied"], ["b/transpose", "b/untied"]]
    for table, expected in ((results(rows), [0, 0.5, 1.0, 1.2]), (results(rows, groups), [0, 0.5, 0, 0.2])):
        assert [cells[3].value for _, cells in table.rows] == pytest.approx(expected, abs=1e-12)
    # the heading names one baseline; arms that none of its kind is comparable to have no difference
    rows = [row | {"arm": row["arm"].replace("b/transpose", "b/adamw")} for row in rows]
    table = results(rows, [groups[0], ["b/adamw", "b/untied"]])
    assert [cells[3].value for _, cells in table.rows] == pytest.approx([0, 0.5, None, None])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": "text:mine"}, "data: stdlib (first/untied, first/transpose); text:mine (second/transpose"),
        ({"tokenizer": "t.json"}, "tokenizer: trained on the corpus (first/untied, first/transpose); t.json (second/"),
        ({"preset": "mini"}, "vocabulary: 4,096 tokens (first/untied, first/transpose); "),
        ({"vocabulary": 300}, "vocabulary: 4,096 tokens (first/untied, first/transpose); 300 tokens (second/transpose"),
    ],
)
def test_what_cannot_be_compared_is_said_at_the_top(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    write_experiment(second, arms=("transpose", "pit-trainable"), text=OTHER_TEXT)
    settings = json.loads((folders["first"] / "experiment.json").read_text())["settings"]
    describe(second, settings=settings | changes, arms={"transpose": {}, "pit-trainable": {}})
    found = differences(load_experiments([folders["first"], second]))
    assert len(found) == 1 and found[0].startswith(sentence), found
    if "data" in changes:
        monkeypatch.chdir(tmp_path)
        main(["report", str(folders["first"]), "second"])
        shown = "".join(Page(tmp_path / "report" / "report.html").text)
        assert shown.index("cannot be compared") < shown.index("data: stdlib") < shown.index("Findings")
        # a winner in each, and none over both
        assert shown.count("lowest") >= 2 and "below first/" in shown and "below second/" in shown


def test_arms_are_grouped_by_what_they_are_measured_on_and_not_by_folder(folders: dict[str, Path]) -> None:
    both = load_experiments([folders["run"], folders["first"], folders["second"]])
    first, second = [f"first/{arm}" for arm in ("untied", "transpose")], ["second/transpose", "second/pit-trainable"]
    assert comparable(both) == [["run/pit-trainable"], first + second]


def test_a_text_is_one_by_whatever_path(tmp_path: Path) -> None:
    for data in ("text:notes", "text:notes/"):
        folder = tmp_path / str(len(data))
        write_experiment(folder)
        describe(folder, settings={"preset": "nano", "data": data})
    both = load_experiments([tmp_path / "10", tmp_path / "11"])
    assert differences(both) == [] and len(comparable(both)) == 1


def test_other_budgets_and_rates_can_be_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    write_experiment(tmp_path / "second", arms=("untied",))
    settings = json.loads((folders["first"] / "experiment.json").read_text())["settings"]
    describe(tmp_path / "second", settings=settings | {"steps": 40, "lr": 0.1})
    assert differences(load_experiments([folders["first"], tmp_path / "second"])) == []


def test_the_budgets_of_an_ablation_are_compared_each_in_itself(tmp_path: Path) -> None:
    arms = ("untied", "transpose")
    for tokens in (400, 1200):
        folder = tmp_path / f"tokens-{tokens}"
        rows = [row | {"tokens": tokens} for row in write_experiment(folder, arms=arms)]
        (folder / "summary.json").write_text(json.dumps(rows))
    budgets = load_experiments([tmp_path])
    groups = [[f"tokens-{tokens}/{arm}" for arm in arms] for tokens in (400, 1200)]
    assert list(budgets.arms) == groups[0] + groups[1] and comparable(budgets) == groups
    assert differences(budgets) == []
    write_experiment(tmp_path, arms=("transpose",))
    assert list(load_experiments([tmp_path]).arms) == ["transpose"]


def test_a_run_has_a_report_of_its_own(folders: dict[str, Path]) -> None:
    run = folders["run"]
    before = tree(run)
    main(["report", str(run)])
    page = Page(run / "report.html")
    shown = "".join(page.text)
    assert "Training run, preset tiny-for-tests" in shown
    assert "manifold-tying train --out" in shown and "--interface pit-trainable --seed 3" in shown
    row = json.loads((run / "result.json").read_text())
    assert page.tables[0][1][0] == ["pit-trainable"] and page.tables[0][1][2][0] == f"{row['val_loss']:.4f}"
    assert before.items() <= tree(run).items() and tree(run).keys() - before.keys() == {"report.html"}


def test_the_command_of_a_run_does_it_again(folders: dict[str, Path], tmp_path: Path) -> None:
    command = json.loads((folders["run"] / "run.json").read_text())["command"]
    words = shlex.split(command)
    words[words.index("--out") + 1] = str(tmp_path / "again")
    main(words[1:])
    for name in ("config.json", "metrics.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (folders["run"] / name).read_bytes()


def test_what_is_no_folder_of_ours_is_refused_before_anything_is_written(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    status, said = run(["report", str(folders["first"]), str(tmp_path / "empty"), "--out", str(out)], capsys)
    assert status == 2 and "neither an ablation" in said
    assert not out.exists()
    with pytest.raises(ValueError, match="given twice"):
        load_experiments([folders["first"], folders["first"] / ".." / "first"])
    with pytest.raises(ValueError, match="at least one folder"):
        load_experiments([])
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(ValueError, match="has not finished"):
        load_experiment(tmp_path / "empty")


def test_folders_are_called_by_as_much_of_their_path_as_tells_them_apart() -> None:
    assert names_of([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "y"]
    assert names_of([Path("/r/a/x/z"), Path("/r/b/x/z")]) == ["a/x/z", "b/x/z"]


def test_the_interface_behind_a_folder() -> None:
    interfaces = {
        "runs/pit-frozen+lr=0.002": "pit-frozen", "transpose/untied": "untied", "transpose+lr=1/untied": "untied",
        "untied+data=text:/corpora/transpose": "untied", "pit-free+tokenizer=/tok/muon+lr=0.1": "pit-free",
        "a+b/poet-block": "poet-block", "untied+body=poet-block": "untied", "other+lr=1": "other",
    }  # fmt: skip
    assert {arm: interface_of(arm) for arm in interfaces} == interfaces
