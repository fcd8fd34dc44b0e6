"""Training: what is learned and written, resumption, rates, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import config, lines, stop_at

from manifold_tying.optim import RiemannianAdam
from manifold_tying.training import Settings, TrainConfig, checkpoints, load_model, resolve, train
from manifold_tying.training.build import build_model, build_optimizer, clipped_parameters
from manifold_tying.training.checkpoint import load_checkpoint
from manifold_tying.training.evaluate import validation_loss
from manifold_tying.training.processes import Processes


@pytest.mark.parametrize("interface", ["untied", "pit-trainable"])
def test_training_learns_and_writes_what_it_says(interface: str, tmp_path: Path, corpus: Path) -> None:
    row = train(config(tmp_path / "run", corpus, interface, steps=60, eval_every=20, checkpoint_every=None))
    metrics = lines(tmp_path / "run")
    assert [m["step"] for m in metrics] == list(range(1, 61))
    assert [m["tokens"] for m in metrics] == [80 * s for s in range(1, 61)]
    assert [m["step"] for m in metrics if "val_loss" in m] == [20, 40, 60]
    # A uniform guess costs log 299 = 5.7 nats.
    assert row["val_loss"] < 4.0 and metrics[0]["loss"] > 5.5
    assert row["val_loss"] == metrics[-1]["val_loss"]
    assert row["train_loss"] == pytest.approx(sum(m["loss"] for m in metrics[-6:]) / 6)
    assert row["tokens"] == 60 * 80 and row["peak_memory_bytes"] > 50e6
    pit = interface.startswith("pit")
    assert (row["defect"] is None) != pit and (row["cond_transform"] is None) != pit
    assert not pit or (row["defect"] <= 1e-6 and row["delta_ti"] / 16**0.5 <= 1e-4 and row["cond_transform"] > 1)
    assert json.loads((tmp_path / "run/result.json").read_text()) == row
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, corpus: Path) -> None:
    train(config(tmp_path / "whole", corpus))
    interrupted = config(tmp_path / "parts", corpus)
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, observer=stop_at(8))  # two steps after the checkpoint, which will have to be done again
    assert [path.name for path in checkpoints(interrupted.out)] == ["step-00000006"]
    train(dataclasses.replace(interrupted, resume=True))
    for name in ("metrics.jsonl", "checkpoints/step-00000012/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert [t["step"] for t in lines(tmp_path / "parts", "timing.jsonl")] == list(range(1, 13))


def test_a_vocabulary_of_its_own_size(tmp_path: Path, corpus: Path) -> None:
    run = config(tmp_path / "run", corpus, steps=1, vocabulary=280)
    train(run)
    interface: Any = load_model(run.out).interface
    assert interface.vocab_size == 280
    assert resolve(run).settings.memory_lr == pytest.approx(0.3 / 280**0.5)


def test_metrics_depend_on_seed_and_not_on_the_arm_before(tmp_path: Path, corpus: Path) -> None:
    def metrics(name: str, **changes: Any) -> bytes:
        run = dataclasses.replace(config(tmp_path / name, corpus, steps=3, checkpoint_every=None), **changes)
        train(run)
        return (run.out / "metrics.jsonl").read_bytes()

    first = metrics("a")
    train(config(tmp_path / "other", corpus, "untied", steps=3, checkpoint_every=None))
    assert metrics("b") == first
    assert metrics("c", seed=1) != first


def test_accumulation_gives_the_same_gradients(tmp_path: Path, corpus: Path) -> None:
    """In parts or at once, up to float32 rounding, which Adam's division enlarges: compared after few steps."""
    losses = {}
    for parts in (1, 3):
        train(config(tmp_path / str(parts), corpus, accumulate=parts, batch_size=6, steps=4, checkpoint_every=None))
        losses[parts] = [m["loss"] for m in lines(tmp_path / str(parts))]
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)


def test_the_memory_slows_down_with_the_steps(tmp_path: Path, corpus: Path) -> None:
    losses = {}
    for n in (0, 2):
        run = config(tmp_path / str(n), corpus, steps=6, warmup_steps=0, memory_slows_after=n)
        train(run)
        losses[n] = [line["loss"] for line in lines(run.out)]
        optimizer = build_optimizer(build_model(resolve(run)), resolve(run).settings)
        assert [group.get("slows_after") for group in optimizer.param_groups].count(n) == (n > 0)
    assert losses[0][:4] == losses[2][:4]  # three steps at the whole rate: step 2 is the first with √(2 / 2)
    assert all(a != b for a, b in zip(losses[0][4:], losses[2][4:], strict=True))


def test_optimizer_gives_every_part_its_rate(tmp_path: Path, corpus: Path) -> None:
    run = resolve(config(tmp_path, corpus, lr=1e-3, memory_lr=2e-3, transform_lr=3e-3, weight_decay=0.1))
    model = build_model(run)
    optimizer = build_optimizer(model, run.settings)
    assert isinstance(optimizer, RiemannianAdam)
    parameters = dict(model.named_parameters())
    stored = "interface.parametrizations.{}.original"
    memory, transform = (parameters[stored.format(name)] for name in ("memory", "cholesky_factor"))
    rates = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert rates[memory] == (2e-3, 0.0) and rates[transform] == (3e-3, 0.0)
    assert rates[parameters["blocks.0.mlp.up.weight"]] == (1e-3, 0.1)
    assert rates[parameters["norm.weight"]] == (1e-3, 0.0)
    assert set(rates) == set(parameters.values())
    clipped = set(clipped_parameters(model))
    assert memory not in clipped and clipped == set(parameters.values()) - {memory}


def test_the_transforms_off_diagonal_has_its_share_of_the_rate(tmp_path: Path, corpus: Path) -> None:
    """Adam's first step moves every entry by its rate."""
    moved = {}
    for share in (None, 0.0, 0.5):
        run = resolve(config(tmp_path, corpus, transform_lr=1e-3, off_diagonal_scale=share))
        model = build_model(run)
        optimizer = build_optimizer(model, run.settings)
        stored = dict(model.named_parameters())["interface.parametrizations.cholesky_factor.original"]
        stored.grad = torch.ones_like(stored)
        before = stored.detach().clone()
        optimizer.step()
        step = (before - stored).detach()
        assert torch.allclose(step.diagonal(), torch.full((step.shape[0],), 1e-3), rtol=1e-3)
        moved[share] = (step.tril(-1).sum() / step.diagonal().sum()).item() * 2 / (step.shape[0] - 1)
    assert moved == pytest.approx({None: 0.1, 0.0: 0.0, 0.5: 0.5}, rel=1e-3)


def test_explicit_settings_win_over_the_recipe() -> None:
    given = Settings(
        lr=1.0, memory_lr=2.0, memory_slows_after=7, betas=(0.5, 0.6), transform_lr=3.0, off_diagonal_scale=5.0, table_std=4.0,
        embedding_norm=False, warmup_steps=0, eval_every=7, diagonal="softplus", retraction="qr",
    )  # fmt: skip
    run = TrainConfig(out=Path("x"), settings=given)
    assert resolve(run) == run
    untied = resolve(TrainConfig(out=Path("x"), interface="untied")).settings
    assert untied.memory_lr is None and untied.transform_lr is None and untied.lr


def test_bad_runs_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown interface 'tied'; choose one of untied"):
        config(tmp_path, corpus, "tied")
    with pytest.raises(ValueError, match="seed >= 0"):
        TrainConfig(out=tmp_path, seed=-1)
    with pytest.raises(ValueError, match="none"):
        train(config(tmp_path / "run", corpus, data=f"text:{tmp_path / 'none'}"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot write to .*file"):
        train(config(tmp_path / "file" / "run", corpus))
    assert not (tmp_path / "run").exists()  # nothing half-written is left behind


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path, corpus: Path) -> None:
    run = config(tmp_path / "run", corpus, steps=3, checkpoint_every=None)
    train(run)
    before = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        train(run)
    other = dataclasses.replace(run, resume=True, settings=dataclasses.replace(run.settings, lr=0.5))
    with pytest.raises(ValueError, match=r"another configuration: lr \(saved .*, now 0\.5\)"):
        train(other)
    assert {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()} == before


def test_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path, corpus: Path) -> None:
    run = resolve(config(tmp_path / "run", corpus, "transpose", steps=2, checkpoint_every=None))
    train(run)
    path = checkpoints(run.out)[-1]
    other = build_model(resolve(config(tmp_path, corpus, "pit-frozen")))
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"does not fit the model: interface"):
        load_checkpoint(path, other, None, run.as_json())
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_nan_in_the_gradient_of_a_memory_is_seen(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not in the norm that is clipped."""
    real, name = build_model, "interface.parametrizations.memory.original"

    def poisoned(run: TrainConfig) -> Any:
        model = real(run)
        dict(model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))
        return model

    monkeypatch.setattr("manifold_tying.training.loop.build_model", poisoned)
    expected = rf"step 1 of pit-trainable, seed 0: the loss is .* gradient of parameter {re.escape(name)} holds NaN"
    with pytest.raises(ValueError, match=expected):
        train(config(tmp_path / "run", corpus))


def test_an_evaluation_weighs_batches_by_their_tokens() -> None:
    """The last batch is shorter than the others."""
    ids = torch.arange(7.0)
    batches = [(ids[:4], ids[:4]), (ids[4:6], ids[4:6]), (ids[6:], ids[6:])]
    assert validation_loss(lambda ids, _: ids.mean(), batches, torch.device("cpu"), Processes()) == ids.mean().item()


@pytest.mark.cuda
@pytest.mark.parametrize("interface", ["transpose", "pit-trainable"])
def test_cuda_trains_like_the_cpu(interface: str, tmp_path: Path, corpus: Path) -> None:
    """bfloat16 autocast against float32: the same course, not the same digits."""
    rows = [train(config(tmp_path / d, corpus, interface, steps=60, device=d)) for d in ("cpu", "cuda")]
    assert rows[1]["val_loss"] == pytest.approx(rows[0]["val_loss"], abs=0.1)
    assert rows[1]["defect"] is None or rows[1]["defect"] <= 1e-6
