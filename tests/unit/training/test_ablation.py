"""The ablation: same data and budget for every arm, what it writes, and the command line around it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import SHAPE, TINY, config

from manifold_tying.cli import main
from manifold_tying.training import AblateConfig, Settings, ablate, loop, train
from manifold_tying.training.arms import parse_arm

KEYS = {
    "arm", "seed", "val_loss", "train_loss", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes", "defect",
    "delta_ti", "cond_transform", "orthogonality_error", "trainable_parameters", "evaluated_tokens", "held_out_sha256",
}  # fmt: skip
ARMS = ("untied", "transpose", "pit-frozen", "pit-trainable", "pit-free")
V, D = SHAPE.vocab_size, SHAPE.hidden_size


def settings(corpus: Path, **changes: Any) -> Settings:
    values = {"steps": 6, "batch_size": 4, "eval_every": 3, "checkpoint_every": None, **changes}
    return config(corpus, corpus, **values).settings


def test_every_arm_and_seed_is_in_the_summary_and_sees_the_same_batches(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    real = loop.train_step

    def spy(state: Any, batch: Any, loss_fn: Any, config: Any, *rest: Any) -> Any:
        seen.setdefault(config.out.name, []).append(torch.stack(batch))
        return real(state, batch, loss_fn, config, *rest)

    monkeypatch.setattr(loop, "train_step", spy)
    rows = ablate(AblateConfig(out=tmp_path / "out", seeds=2, settings=settings(corpus)))
    assert [(row["arm"], row["seed"]) for row in rows] == [(arm, seed) for seed in (0, 1) for arm in ARMS]
    assert json.loads((tmp_path / "out/summary.json").read_text()) == rows
    for row in rows:
        assert set(row) == KEYS
        run = tmp_path / "out" / f"{row['arm']}-{row['seed']}"
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
        assert list(run.glob("events.out.tfevents.*"))
    parameters = {row["arm"]: row["trainable_parameters"] for row in rows}
    # a second table; a memory; the raw Cholesky factor, of which the strict upper triangle stays zero
    assert parameters["untied"] - parameters["transpose"] == V * D
    assert parameters["pit-trainable"] - parameters["pit-frozen"] == V * D
    assert parameters["pit-trainable"] - parameters["transpose"] == D * D
    experiment = json.loads((tmp_path / "out/experiment.json").read_text())
    assert set(experiment["arms"]) == set(ARMS)
    memory_lr = {arm: own["memory_lr"] for arm, own in experiment["arms"].items()}
    assert memory_lr["pit-trainable"] > 0 and memory_lr["pit-frozen"] is None
    assert experiment["settings"]["seeds"] == 2 and experiment["machine"]["torch"] == torch.__version__
    stacks = {name: torch.stack(batches) for name, batches in seen.items()}
    for arm in ARMS:
        for seed in (0, 1):
            assert torch.equal(stacks[f"{arm}-{seed}"], stacks[f"untied-{seed}"])
    assert not torch.equal(stacks["untied-0"], stacks["untied-1"])


def test_the_same_command_again_does_only_what_is_missing(tmp_path: Path, corpus: Path) -> None:
    small = AblateConfig(out=tmp_path / "out", arms="untied,pit-frozen", seeds=1, settings=settings(corpus))
    first = ablate(small)
    trained: list[str] = []

    def started(name: str, index: int, count: int) -> Any:
        trained.append(name)
        return lambda metrics: None

    more = dataclasses.replace(small, seeds=2)
    assert [row for row in ablate(more, started=started) if row["seed"] == 0] == first
    assert trained == ["untied-1", "pit-frozen-1"]
    with pytest.raises(ValueError, match=r"holds a run with another lr \(saved .*, now .*\); choose another --out"):
        ablate(dataclasses.replace(more, settings=settings(corpus, lr=0.5)))


def test_a_damaged_run_is_named_before_the_summary_is_written(tmp_path: Path, corpus: Path) -> None:
    config = AblateConfig(out=tmp_path, arms="untied", seeds=1, settings=settings(corpus, steps=1))
    (row,) = ablate(config)
    summary, result = (tmp_path / name for name in ("summary.json", "untied-0/result.json"))
    before = summary.read_bytes()
    for damage in ({}, {**row, "seed": 1}, {**row, "val_loss": "low"}):
        result.write_text(json.dumps(damage))
        with pytest.raises(ValueError, match=r"untied-0 has no whole run of seed 0; delete that folder"):
            ablate(config)
    result.write_text(json.dumps(row))
    (tmp_path / "untied-0/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="delete that folder"):
        ablate(config)
    assert summary.read_bytes() == before


def test_a_folder_has_results_of_one_kind(tmp_path: Path, corpus: Path) -> None:
    """A report would show one kind and leave the other out."""
    experiment = AblateConfig(out=tmp_path / "a", arms="untied", seeds=1, settings=settings(corpus, steps=1))
    budgets = dataclasses.replace(experiment, tokens="64", settings=settings(corpus, steps=Settings.steps))
    run = config(tmp_path / "a", corpus, steps=1)

    def start(what: Any, out: str) -> Any:
        what = dataclasses.replace(what, out=tmp_path / out)
        return train(what) if what.__class__ is run.__class__ else ablate(what)

    for first, *others in ((experiment, budgets, run), (budgets, experiment, run), (run, experiment, budgets)):
        out = f"{len(list(tmp_path.iterdir()))}"
        start(first, out)
        for other in others:
            with pytest.raises(ValueError, match=r"already belongs to other results, those of .*choose another --out"):
                start(other, out)


def test_an_interrupted_command_keeps_the_rows_of_what_has_finished(tmp_path: Path, corpus: Path) -> None:
    first = AblateConfig(out=tmp_path, arms="untied,transpose", seeds=2, settings=settings(corpus, steps=1))
    rows = ablate(first)

    def started(name: str, index: int, count: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate(dataclasses.replace(first, arms="untied,pit-frozen,transpose"), started=started)
    assert json.loads((tmp_path / "summary.json").read_text()) == rows


def test_arms_that_an_earlier_command_left_are_named(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = AblateConfig(out=tmp_path / "out", arms="untied,transpose", seeds=1, settings=settings(corpus))
    ablate(small)
    capsys.readouterr()
    ablate(dataclasses.replace(small, arms="transpose"))
    assert "also holds untied; the summary and the report have only" in capsys.readouterr().out


def test_settings_without_effect_are_not_described(tmp_path: Path, corpus: Path) -> None:
    values = settings(corpus, steps=1, body_lr=0.5, memory_lr=9.0)
    ablate(AblateConfig(out=tmp_path, arms="untied,transpose", seeds=1, settings=values))
    described = json.loads((tmp_path / "experiment.json").read_text())
    assert not {"init", "block_size", "merge_every", "body_lr", "memory_lr"} & set(described["settings"])
    assert not {"init", "block_size", "merge_every"} & set(described["arms"]["untied"])
    ablate(AblateConfig(out=tmp_path / "two", arms="untied,pit-trainable+memory_lr=8.0", seeds=1, settings=values))
    own = json.loads((tmp_path / "two/experiment.json").read_text())["arms"]
    assert own["untied"]["memory_lr"] is None and own["pit-trainable+memory_lr=8.0"]["memory_lr"] == 8.0


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("memory", r"unknown arm 'memory'; choose from untied, transpose, pit-frozen, pit-trainable"),
        ("pit-trainble", r"unknown arm 'pit-trainble' \(did you mean pit-trainable\?\); choose from"),
        ("untied+tabel_lr=3", r"unknown change 'tabel_lr=3' in arm 'untied\+tabel_lr=3' \(did you mean table_lr\?\)"),
        ("untied+lr", r"unknown change 'lr' in arm 'untied\+lr'; write name=value"),
        ("untied+speed=3", r"unknown change 'speed=3' in arm 'untied\+speed=3'"),
        ("untied+lr=1+lr=2", r"each setting once, got lr twice in arm 'untied\+lr=1\+lr=2'"),
        ("untied+lr=fast", r"expected lr to be of type .*float.*, got 'fast'"),
        ("untied+lr=1e+3", r"write 1e3 for 1e\+3"),
        ("untied,untied", r"different arms"),
        (" , ", r"different arms"),
        ("poet-full+body=adamw", r"unknown change 'body=adamw'"),
        ("poet-block+fraction=0.1", r"poet-block does not use fraction"),
        ("poet-full+block_size=7", r"poet-full does not use block_size"),
        ("pit-trainable+memory_rule=muon+project_every=3", r"pit-trainable does not use project_every"),
    ],
)
def test_bad_arms_are_refused_before_anything_is_written(arms: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        AblateConfig(out=tmp_path / "out", arms=arms)
    assert not (tmp_path / "out").exists()


def test_several_budgets_each_in_its_folder(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shared = ["--preset", TINY, "--data", f"text:{corpus}", "--device", "cpu", "--batch-size", "4"]
    shared += ["--sequence-length", "16", "--val-tokens", "128", "--lr", "0.004", "--seeds", "1", "--out", str(out)]
    shared += ["--arms", "transpose", "--tokens", "128, 256"]
    main(["ablate", *shared, "--dry-run"])
    assert [re.findall(r"--steps (\d+)", line) for line in capsys.readouterr().out.splitlines()] == [["2"], ["4"]]
    assert not out.exists()
    main(["ablate", *shared, "--memory-lr", "9"])
    assert "note: no arm uses memory_lr" in capsys.readouterr().out
    for tokens in (128, 256):
        rows = json.loads((out / f"tokens-{tokens}/summary.json").read_text())
        assert [(row["arm"], row["tokens"]) for row in rows] == [("transpose", tokens)]
        assert (out / f"tokens-{tokens}/report.html").is_file()
    assert (out / "report.html").is_file()


@pytest.mark.parametrize(("tokens", "changes", "message"), [
    ("64,64", {}, "different numbers of tokens"),
    ("64,70", {}, "as far apart"),
    ("63", {}, r"each at least 64 \(one step\)"),
    ("64", {"steps": 3}, "expected steps or tokens, got both"),
])  # fmt: skip
def test_bad_budgets_are_refused(
    tokens: str, changes: dict[str, int], message: str, tmp_path: Path, corpus: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        AblateConfig(out=tmp_path, tokens=tokens, settings=settings(corpus, **{"steps": Settings.steps, **changes}))


def test_arms_take_the_shared_settings(corpus: Path) -> None:
    arm = "pit-trainable+lr=2e-3+compile=true+embedding_norm=false+memory_lr=null"
    interface, own = parse_arm(arm, settings(corpus, steps=9, memory_lr=0.1))
    assert interface == "pit-trainable" and (own.lr, own.compile, own.steps) == (2e-3, True, 9)
    assert own.embedding_norm is False and own.memory_lr is None
    # as train's options, which --dry-run prints
    assert parse_arm("untied+logit_scale=True+table_lr=None", settings(corpus))[1].logit_scale is True
    # An arm called adamw is that, whatever body the other arms share.
    assert parse_arm("adamw", settings(corpus, body="poet-full"))[1].body == "adamw"
    interface, own = parse_arm("poet-full", settings(corpus))
    assert (interface, own.body) == ("untied", "poet-full")
