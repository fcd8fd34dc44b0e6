"""The papers' comparisons: what is run, what the tables say of it, and the command around them."""

import dataclasses
import json
import math
import re
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from training_runs import SHAPE, TINY

import manifold_tying as mt
from experiments import RECIPES, ReproduceConfig, adaptation, poet, reproduce
from experiments.budgets import candidates, trial_specs
from experiments.comparison import Arm, Table, Trained, agreement, loss_table
from experiments.recipes import run_reproduce
from manifold_tying.cli import main
from manifold_tying.models import PRESETS, preset
from manifold_tying.training import AblateConfig, Settings, TrainConfig, resolve
from manifold_tying.training.arms import parse_arm
from manifold_tying.training.build import build_model
from manifold_tying.training.numbers import significant
from manifold_tying.training.rundir import RESULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrieflyEvaluated(Settings):
    """A run of two steps takes most of its time to evaluate."""

    val_tokens: int = 96


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, TINY, SHAPE)
    monkeypatch.setattr("experiments.recipes.Settings", BrieflyEvaluated)


def config(name: Any, out: Path, corpus: Path, **changes: Any) -> ReproduceConfig:
    values: dict[str, Any] = {
        "preset": TINY, "data": f"text:{corpus}", "tokens": 96, "batch_size": 3, "sequence_length": 16, "seeds": 2,
        **changes,
    }  # fmt: skip
    return ReproduceConfig(name=name, out=out, **values)


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("poet")])
def test_poet_comparisons_have_a_line_for_every_arm(
    name: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of arms that differ, with what the runs are said to have found; nothing is trained."""
    found: dict[Path, list[dict[str, Any]]] = {}

    def made_up(experiment: AblateConfig, started: Any) -> list[dict[str, Any]]:
        experiment.out.mkdir(parents=True, exist_ok=True)
        runs = enumerate(experiment.runs())
        numbers = {"seed": 0, "trainable_parameters": 1_000_000, "orthogonality_error": 1e-3}
        found[experiment.out] = [{"arm": arm, "val_loss": 3 + number / 8, **numbers} for number, (arm, _) in runs]
        return found[experiment.out]

    monkeypatch.setattr("experiments.comparison.ablate", made_up)
    steps = 30 if name == "poet-merging" else 2  # T_m = 5 and 25, and 50 for never
    tables = reproduce(config(name, tmp_path, corpus, seeds=1, tokens=48 * steps))
    assert len(found) == (3 if name == "poet-budget" else 1)
    for table, trained in zip(tables, found.values(), strict=False):
        assert [f"{row['val_loss']:.3f}" for row in trained] == [line[1] for line in table.body if line[1] != "—"]
        assert len(trained) >= 3
    assert (tmp_path / "tables.md").read_text().count("### POET") == len(tables)


@pytest.mark.parametrize("h", [8, 3])
def test_a_budget_is_one_number_of_parameters(h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "mini", dataclasses.replace(PRESETS["mini"], num_layers=1, vocab_size=300))
    counts = []
    for arm in poet.budget_arms(h):
        interface, settings = parse_arm(arm.spec or "", Settings(preset="mini"))
        model = build_model(resolve(TrainConfig(out=Path("unused"), interface=interface, settings=settings)))
        counts.append(sum(p.numel() for n, p in model.blocks.named_parameters() if p.requires_grad and "norm" not in n))
    assert len(counts) == 7 and max(counts) < 1.05 * min(counts)  # whole dimensions, and no more than there are


def test_from_scratch(tmp_path: Path, corpus: Path) -> None:
    losses, consistency = reproduce(config("pit-from-scratch", tmp_path, corpus))
    found: dict[str, list[float]] = {}
    for row in rows(tmp_path):
        found.setdefault(row["arm"], []).append(row["val_loss"])
    assert list(found) == [
        "transpose", "pit-frozen+embedding_norm=false", "pit-frozen", "pit-trainable", "untied"
    ]  # fmt: skip
    for line, values in zip(losses.body, found.values(), strict=True):
        assert line[1] == f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
        assert line[3] == f"{math.exp(np.mean(values)):.1f}"
    difference = np.subtract(found["untied"], found["transpose"])
    assert losses.body[-1][2] == f"{difference.mean():+.3f} ± {difference.std(ddof=1):.3f}".replace("-", "−")
    # by the paper's own definition transpose tying is perfect; by the other one only PIT is
    of = {line[0]: line for line in consistency.body}
    assert all("10⁻¹" in cell or cell == "0.0" for cell in of["transpose tying"][1:3])
    assert of["transpose tying"][-1].startswith("0.1241")
    E, W_out, _ = mt.diagnostics.inspect_tables(tmp_path / "pit-trainable-0")
    assert mt.diagnostics.interface_consistency(E, W_out).anchor_cosine_distance < 1e-6
    assert float(of["transpose tying"][4]) > 0.01


def test_every_arm_is_tuned_by_as_many_trials_at_every_budget(tmp_path: Path, corpus: Path) -> None:
    arms = "transpose-scaled,untied-normalized,pit-trainable"
    lead, *tables = reproduce(config("pit-budgets", tmp_path, corpus, tokens="96,144", arms=arms))
    best_plain = []
    for tokens, (losses, interface, trials) in zip((96, 144), (tables[:3], tables[3:]), strict=True):
        folder = tmp_path / f"tokens-{tokens}"
        tried: dict[str, dict[str, float]] = {}
        for label, spec, loss, _ in trials.body:
            result = json.loads((folder / f"{spec.strip('`')}-0" / RESULT).read_text())
            assert loss == f"{result['val_loss']:.3f}" and result["tokens"] == tokens
            tried.setdefault(label, {})[spec.strip("`")] = result["val_loss"]
        assert [len(of_arm) for of_arm in tried.values()] == 3 * [4]
        best = {label: min(of_arm, key=lambda spec: of_arm[spec]) for label, of_arm in tried.items()}
        assert {line[0]: line[1].strip("`") for line in trials.body if line[3]} == best
        # the chosen ones, and only those, went through every seed
        assert [(row["arm"], row["seed"]) for row in rows(folder)] == [
            (spec, seed) for seed in (0, 1) for spec in best.values()
        ]
        found = {label: [row["val_loss"] for row in rows(folder) if row["arm"] == spec] for label, spec in best.items()}
        for line, values in zip(losses.body, found.values(), strict=True):
            assert line[1].startswith(f"{np.mean(values):.3f} ±")
        assert [line[0] for line in interface.body] == ["PIT, Z trained"]
        assert all(float(line[1].split("×")[0]) > 0 and "10⁻" in line[1] for line in interface.body)  # W_out E = I
        plain = min((label for label in found if "PIT" not in label), key=lambda label: np.mean(found[label]))
        difference = np.subtract(found[plain], found["PIT, Z trained"])
        best_plain.append(f"{difference.mean():+.3f} ± {difference.std(ddof=1):.3f} ({plain})".replace("-0", "−0"))
    printed = StringIO()
    further = {"tokens": "96,240", "arms": arms, "seeds": 3, "dry_run": True}
    run_reproduce(config("pit-budgets", tmp_path, corpus, **further), Console(file=printed))
    left = re.findall(r"(\d+) +(\d+) +(\d+) +0\.\d", printed.getvalue())
    assert left == [("96", "15", "3"), ("240", "0", "18")]  # of 12 trials and 2 more seeds of 3 arms
    assert list(lead.body[-1][1:]) == best_plain
    assert len(lead.body) == 4


@pytest.mark.parametrize("arm", candidates(256))
def test_trials_stand_around_the_recipe(arm: str) -> None:
    shared = Settings(preset="mini")
    candidate = candidates(256)[arm]
    usual, *others = [
        resolve(TrainConfig(out=Path(), interface=candidate.interface, settings=parse_arm(spec, shared)[1])).settings
        for spec in trial_specs(candidate, shared)
    ]
    for trial, factors in zip(others, candidate.trials[1:], strict=True):
        names = [name for name in ("lr", "transform_lr", "memory_lr", "table_std") if getattr(usual, name) is not None]
        ratios = {name: getattr(trial, name) / getattr(usual, name) for name in names}
        changed = {name: ratio for name, ratio in ratios.items() if not math.isclose(ratio, 1, rel_tol=1e-3)}
        assert changed == pytest.approx(factors, rel=1e-3)  # PIT's T keeps its rate where the body's changes


def test_ingredients(tmp_path: Path, corpus: Path) -> None:
    losses, interface = reproduce(config("pit-ingredients", tmp_path, corpus, seeds=1))
    of = {row["arm"]: row for row in rows(tmp_path)}
    assert len(losses.body) == len(of) == 16 and not [row for row in of.values() if "failed" in row]
    assert len(losses.head) == len(losses.body[0]) == 5  # no column for a paper that has no such table
    whole = of["pit-trainable"]["val_loss"]
    for line, row in zip(losses.body[1:], list(of.values())[1:], strict=True):
        assert line[2] == f"{row['val_loss'] - whole:+.3f}".replace("-", "−")
        # what is removed is in use; the memory slows down from step 60 on, and these runs are shorter
        assert (row["val_loss"] != whole) == ("memory_slows_after" not in row["arm"])
    assert len(interface.body) == 12
    specs = [spec for spec in of if spec == "pit-trainable" or "memory_lr" in spec]
    rates = [json.loads((tmp_path / f"{spec}-0/config.json").read_text())["memory_lr"] for spec in specs]
    _, body, four_times, quarter = (rate / rates[0] for rate in rates)
    assert (round(four_times, 3), round(quarter, 3)) == (4, 0.25) and body not in (1, 4, 0.25)
    assert interface.body[0][3] == significant(of["pit-trainable"]["cond_transform"], 2)


def test_continued_from_a_source_of_its_own(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source_text = tmp_path / "text.txt"
    source_text.write_text(corpus.read_text())
    own = {"source_data": f"text:{source_text}", "source_tokens": 4096, "seeds": 1}
    losses, consistency, early = reproduce(config("pit-continued", tmp_path, corpus, **own))
    trained = {row["arm"]: row for row in rows(tmp_path)}
    assert len(trained) == 10 and not [row for row in trained.values() if "failed" in row]
    first = json.loads((tmp_path / "transpose-0/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert early.body[0][1] == f"{first:.3f}"
    # a source at the usual rate, settled in a quarter of the steps at a tenth of it; the arms start from that
    runs = ("source/run", "source/settled", "transpose-0")
    source, settled, arm = (json.loads((tmp_path / run / "config.json").read_text()) for run in runs)
    begun = [str(Path(run["init_from"]).relative_to(tmp_path)) for run in (source, settled, arm)]
    assert begun == [f"source/start-{TINY}", "source/run/model", "source/settled/model"]
    assert settled["lr"] == 0.1 * source["lr"] and settled["steps"] * 3 == source["steps"]
    assert len(consistency.body) == 10 and len(losses.body) == 10
    # the same command again trains nothing
    results = [tmp_path / "source/run" / RESULT, tmp_path / "transpose-0" / RESULT]
    before = [path.stat().st_mtime_ns for path in results]
    again = reproduce(config("pit-continued", tmp_path, corpus, **own))
    assert again == [losses, consistency, early] and [path.stat().st_mtime_ns for path in results] == before
    # a source of another length or of another model is not that of this command
    for change, differs in (({"source_tokens": 8192}, "steps"), ({"preset": "bytes"}, "init_from")):
        with pytest.raises(ValueError, match=f"source/run holds a run with another .*{differs} "):
            reproduce(config("pit-continued", tmp_path, corpus, **own | change))
    source_text.write_text(source_text.read_text() + "one more line\n")
    with pytest.raises(ValueError, match="trained on another text"):
        reproduce(config("pit-continued", tmp_path, corpus, **own))


def test_adaptation(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "STEPS", 2)
    monkeypatch.setattr(adaptation, "EVALUATED", 30)
    own = {"source_data": f"text:{corpus}", "source_tokens": 4096, "seeds": 1}
    (table,) = reproduce(config("pit-adaptation", tmp_path, corpus, **own))
    assert [line[0] for line in table.body] == [
        "transpose tying", "PIT, Z frozen, T = I (the paper's)", "PIT, Z trained, by rotation"
    ]  # fmt: skip
    rotated = "pit-trainable+init_transform=rotation-0"
    row = json.loads((tmp_path / "adapted" / rotated / "result.json").read_text())
    assert table.body[2][1] == f"{100 * row['in_domain']:.1f}" and table.body[0][-1] == "16.9 / 12.4"
    before, after = (
        mt.diagnostics.inspect_tables(folder)
        for folder in (tmp_path / "continued" / rotated / "model", tmp_path / "adapted" / rotated / "run/model")
    )
    assert torch.equal(before.E, after.E) and torch.equal(before.W_out, after.W_out)  # LoRA alone


def test_an_adapted_run_has_the_seed_of_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where seed 0 stopped."""
    given: list[tuple[str, int]] = []

    def train_arms(folder: Path, arms: list[Arm], *rest: Any) -> Trained:
        return Trained(arms=arms, rows=[{"arm": arm.spec, "seed": 1, "val_loss": 2.0} for arm in arms], folder=folder)

    def adapt(checkpoint: Path, out: Path, *, seed: int, **options: Any) -> dict[str, float]:
        given.append((out.name.rpartition("-")[2], seed))
        return {"in_domain": 0.5, "out_of_domain": 0.5, "in_domain_before": 0.5}

    monkeypatch.setattr(adaptation, "train_arms", train_arms)
    monkeypatch.setattr(adaptation, "adaptation", adapt)
    monkeypatch.setattr(adaptation, "read_shape", lambda _: preset("nano"))
    adaptation.adapted(tmp_path, Settings(), 2, None)
    assert given == 3 * [("1", 1)]


def test_agreement_is_spearmans() -> None:
    printed = {"a": 1.0, "b": 2.0, "c": 3.0, "not run": 4.0}
    assert "ρ = 1.00 over 3" in (agreement({"a": 0.1, "b": 0.2, "c": 0.9, "own": 5.0}, printed) or "")
    assert "ρ = −1.00" in (agreement({"a": 3, "b": 2, "c": 1}, printed) or "")
    assert agreement({"a": 1, "b": 2}, printed) is None


def test_a_run_that_stopped_is_named(tmp_path: Path) -> None:
    arms = [Arm(label="first", spec="adamw", printed=1.0), Arm(label="second", spec="untied")]
    done = {"arm": "adamw", "seed": 1, "val_loss": 2.0, "trainable_parameters": 1_500_000}
    failed = {"arm": "untied", "seed": 0, "failed": "Diverged: loss is NaN at step 3"}
    trained = Trained(arms=arms, rows=[failed, done], folder=tmp_path)
    table = loss_table("t", trained, "paper", [])
    assert table.body == [["first", "2.000", "", "7.4", "1.50", "1.00"], ["second", "—", "", "—", "—", "—"]]
    assert table.notes == ["second, seed 0, stopped before its end: Diverged: loss is NaN at step 3"]
    assert [trained.runs(arm) for arm in arms] == [{1: tmp_path / "adamw-1"}, {}]  # finished ones keep their seeds


def test_markdown_keeps_its_columns() -> None:
    text = Table(title="t", head=["a", "b"], body=[["x|y", "1"]], notes=["n"]).markdown()
    assert text == "### t\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\n- n\n"


def test_command(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["--preset", TINY, "--tokens", "48", "--batch-size", "3", "--sequence-length", "16", "--seeds", "1"]
    words = ["reproduce", "poet-initialization", "--out", str(tmp_path / "out"), "--data", f"text:{corpus}", *own]
    monkeypatch.setattr("sys.argv", ["manifold-tying", *words])
    main(words)
    assert "uniform-spectrum" in capsys.readouterr().out
    described = json.loads((tmp_path / "out/tables.json").read_text())
    assert described["comparison"] == "poet-initialization" and len(described["tables"][0]["body"]) == 4
    experiment = json.loads((tmp_path / "out/experiment.json").read_text())  # what the report page shows
    assert described["command"] == experiment["command"] == shlex.join(["manifold-tying", *words])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "pit-budgets", "arms": "transpose,tied"}, "unknown arms tied; choose from transpose, "),
        ({"name": "pit-budgets", "tokens": "128,128"}, "different numbers of tokens"),
        ({"arms": "transpose"}, "only pit-budgets takes arms"),
        ({"dry_run": True}, "only pit-budgets takes arms"),
        ({"name": "pit-table-9"}, "unknown comparison 'pit-table-9'; choose one of pit-from-scratch"),
        ({"tokens": 0}, "expected tokens >= 1"),
        ({"preset": "giant"}, "giant"),
        ({"source_tokens": 10}, "only pit-continued and pit-adaptation take source_tokens"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"name": "poet-terms", "out": tmp_path / "out", "preset": TINY, "batch_size": 4, **changes}
    with pytest.raises(ValueError, match=message):
        ReproduceConfig(**values)
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_is_said_before_anything_is_written(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        reproduce(config("pit-continued", tmp_path / "out", corpus, init_from=tmp_path / "nowhere"))
    assert not (tmp_path / "out").exists()
