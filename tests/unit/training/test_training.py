"""Training: resumption, accumulation, what is written, and what is refused."""

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from manifold_tying.models import PRESETS
from manifold_tying.optim import RiemannianAdam
from manifold_tying.training import Settings, TrainConfig, train
from manifold_tying.training._build import FINAL_RATE, build_model, build_optimizer, clipped_parameters, rate_factor
from manifold_tying.training._checkpoint import checkpoints, load_checkpoint
from manifold_tying.training._evaluation import evaluate
from manifold_tying.training._processes import Processes
from manifold_tying.training._recipe import resolve
from manifold_tying.tying import PIT

INTERFACES = ("untied", "transpose", "pit-frozen", "pit-trainable")
TINY = "tiny-for-tests"


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that trains in milliseconds; the rest of the way is the real one."""
    shape = dataclasses.replace(
        PRESETS["nano"], vocab_size=300, hidden_size=16, num_layers=2, intermediate_size=32, head_dim=0
    )
    monkeypatch.setitem(PRESETS, TINY, shape)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with something to learn in it: sums that are right."""
    path = tmp_path_factory.mktemp("corpus") / "sums.txt"
    path.write_text("\n".join(f"{a} plus {b} is {a + b};" for a in range(60) for b in range(40)))
    return path


def config(
    out: Path, corpus: Path, interface: Any = "pit-trainable", resume: bool = False, **settings: Any
) -> TrainConfig:
    values = {
        "preset": TINY, "data": f"text:{corpus}", "steps": 12, "batch_size": 4, "sequence_length": 16, "val_tokens": 128,
        "eval_every": 4, "checkpoint_every": 5, "lr": 4e-3, **settings,
    }  # fmt: skip
    return TrainConfig(out=out, interface=interface, resume=resume, settings=Settings(**values))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("interface", INTERFACES)
def test_training_learns_and_writes_what_it_says(interface: str, tmp_path: Path, corpus: Path) -> None:
    row = train(config(tmp_path / "run", corpus, interface, steps=60, eval_every=20, checkpoint_every=None))
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 61))
    assert [m["tokens"] for m in metrics] == [64 * s for s in range(1, 61)]
    assert [m["step"] for m in metrics if "val_loss" in m] == [20, 40, 60]
    # A uniform guess costs log 300 = 5.7 nats; a frozen memory learns far less than the others, which end below 3.5.
    assert row["val_loss"] < (5.2 if interface == "pit-frozen" else 4.0) and metrics[0]["loss"] > 5.5
    assert row["val_loss"] == metrics[-1]["val_loss"]
    assert row["train_loss"] == pytest.approx(sum(m["loss"] for m in metrics[-6:]) / 6)
    assert row["tokens"] == 60 * 64 and row["peak_memory_bytes"] > 50e6
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    pit = interface.startswith("pit")
    assert (row["defect"] is None) != pit and (row["cond_transform"] is None) != pit
    assert not pit or (row["defect"] <= 1e-6 and row["delta_ti"] / 16**0.5 <= 1e-4 and row["cond_transform"] > 1)
    assert json.loads((tmp_path / "run/result.json").read_text()) == row
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("interface", INTERFACES)
def test_resumed_run_equals_uninterrupted_run(interface: str, tmp_path: Path, corpus: Path) -> None:
    train(config(tmp_path / "whole", corpus, interface))
    interrupted = config(tmp_path / "parts", corpus, interface)

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 8:  # three steps after the checkpoint, which will have to be done again
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, observer=stop)
    assert [path.name for path in checkpoints(interrupted.out)] == ["step-00000005"]
    train(dataclasses.replace(interrupted, resume=True))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    last = "checkpoints/step-00000012/model.safetensors"
    assert (whole / last).read_bytes() == (parts / last).read_bytes()
    assert [t["step"] for t in lines(parts / "timing.jsonl")] == list(range(1, 13))


def test_killed_process_resumes_to_the_same_metrics(tmp_path: Path, corpus: Path) -> None:
    """The real command, the real signal: nano for a few steps on little text."""
    shared = [sys.executable, "-m", "manifold_tying", "train", "--preset", "nano", "--interface", "pit-trainable"]
    shared += ["--data", f"text:{corpus}", "--steps", "8", "--checkpoint-every", "2", "--batch-size", "1"]
    shared += ["--sequence-length", "16", "--val-tokens", "32", "--resume", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([*shared, "--out", str(tmp_path / "killed")], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not checkpoints(tmp_path / "killed") and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert checkpoints(tmp_path / "killed")
    for out in ("killed", "whole"):
        subprocess.run([*shared, "--out", str(tmp_path / out)], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


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
    for parts in (1, 2, 4):
        train(config(tmp_path / str(parts), corpus, accumulate=parts, steps=4, checkpoint_every=None, weight_decay=0.1))
        losses[parts] = [m["loss"] for m in lines(tmp_path / str(parts) / "metrics.jsonl")]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[4] == pytest.approx(losses[1], rel=1e-4)


# torch 2.13's own way of tracing an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_model_trains_alike(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a compiler for the generated code: the capture of the graphs is what can go wrong on our side.
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    for name, compiled in (("eager", False), ("compiled", True)):
        train(config(tmp_path / name, corpus, compile=compiled, steps=4, checkpoint_every=None))
    eager, compiled_ = ([m["loss"] for m in lines(tmp_path / n / "metrics.jsonl")] for n in ("eager", "compiled"))
    assert compiled_ == pytest.approx(eager, rel=1e-4)


def test_penalties_pull_the_transform_to_the_identity(tmp_path: Path, corpus: Path) -> None:
    spread = {}
    for weight in (0.0, 100.0):
        run = config(tmp_path / str(weight), corpus, "pit-frozen", diagonal_penalty=weight, log_det_penalty=weight)
        train(run)
        model = build_model(resolve(run))
        load_checkpoint(checkpoints(run.out)[-1], model, None, resolve(run).as_json())
        assert isinstance(model.interface, PIT)
        spread[weight] = model.interface.cholesky_factor.diagonal().log().square().mean().item()
    assert spread[100.0] < 0.2 * spread[0.0]


def test_schedule_warms_up_and_decays() -> None:
    settings = Settings(steps=100, warmup_steps=10)
    factors = [rate_factor(step, settings) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1 and factors[-1] == pytest.approx(FINAL_RATE)
    middle = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * 45 / 89))
    assert factors[55] == pytest.approx(middle)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_the_memory_slows_down_with_the_steps(tmp_path: Path, corpus: Path) -> None:
    """From step n on, its rate alone has a further factor √(n / step)."""
    settings = Settings(steps=100, warmup_steps=10)
    factors = [rate_factor(step, settings, 20) / rate_factor(step, settings) for step in range(100)]
    assert factors == pytest.approx([1.0] * 20 + [math.sqrt(20 / step) for step in range(20, 100)])
    losses = {}
    for n in (0, 2):
        run = config(tmp_path / str(n), corpus, steps=6, warmup_steps=0, memory_slows_after=n)
        train(run)
        losses[n] = [json.loads(line)["loss"] for line in (run.out / "metrics.jsonl").read_text().splitlines()]
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
    memory = parameters["interface.parametrizations.memory.original"]
    transform = parameters["interface.parametrizations.cholesky_factor.original"]
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "huge"}, r"nano"),
        ({"steps": 0}, r"steps >= 1, got 0"),
        ({"lr": float("nan")}, r"lr >= 0, got nan"),
        ({"batch_size": 4, "accumulate": 3}, r"accumulate to divide batch_size=4, got 3"),
        ({"retraction": "svd"}, r"unknown retraction 'svd'; choose one of polar, qr"),
        ({"device": "tpu9"}, r"unknown device 'tpu9'"),
        ({"device": "meta"}, r"unknown device 'meta'; use cpu, cuda or cuda:N"),
        ({"device": "mps"}, r"unknown device 'mps'; use cpu, cuda or cuda:N"),
        ({"lr": 1e38}, r"expected lr <= 1e\+34, got 1e\+38"),
        ({"betas": 0.9}, r"betas to be two numbers in \[0, 1\), got 0\.9"),
        ({"betas": (0.9, 1.0)}, r"betas to be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
        ({"second_moment": "col"}, r"unknown second_moment 'col'"),
        ({"device": "cuda:99"}, r"'cuda:99' is not there"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)


def test_bad_runs_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown interface 'tied'; choose one of untied"):
        config(tmp_path, corpus, "tied")
    with pytest.raises(ValueError, match="seed >= 0"):
        TrainConfig(out=tmp_path, seed=-1)
    for data, message in ((f"text:{tmp_path / 'none'}", "none"), ("ftp:x", "stdlib")):
        with pytest.raises(ValueError, match=message):
            train(config(tmp_path / "run", corpus, data=data))
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(ValueError, match=r"tokens|short"):
        train(config(tmp_path / "run", corpus, data=f"text:{short}"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty|text"):
        train(config(tmp_path / "run", corpus, data=f"text:{tmp_path / 'empty.txt'}"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot write to .*file"):
        train(config(tmp_path / "file" / "run", corpus))
    assert not (tmp_path / "run").exists()  # nothing half-written is left behind


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path, corpus: Path) -> None:
    run = config(tmp_path / "run", corpus, steps=3, checkpoint_every=None)
    train(run)
    before = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds a run already; go on with it \(--resume\)"):
        train(run)
    other = dataclasses.replace(run, resume=True, settings=dataclasses.replace(run.settings, lr=0.5))
    with pytest.raises(ValueError, match=r"another configuration: lr=.*0\.5 here"):
        train(other)
    assert {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "garbage"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_gone_on_from(
    name: str, damage: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(tmp_path / "run", corpus)
    train(run)
    newest = checkpoints(run.out)[-1]
    assert [path.name for path in checkpoints(run.out)] == ["step-00000010", "step-00000012"]
    file = newest / name
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        file.write_bytes(bytes(255 for _ in content))
    else:
        file.unlink()
    before = (run.out / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"damaged: .* --resume-from step-00000010"):  # which was asked for by its name
        train(dataclasses.replace(run, resume_from=newest.name))
    train(dataclasses.replace(run, resume=True))
    (said,) = capsys.readouterr().out.splitlines()
    assert re.search(
        r"step-00000012 is damaged: .*Set aside as aside-step-00000012; going on from step-00000010$", said
    )
    assert (run.out / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in checkpoints(run.out)] == ["step-00000010", "step-00000012"]
    assert (newest.parent / "aside-step-00000012").is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_starts_anew(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(tmp_path / "run", corpus)
    train(run)
    before = (run.out / "metrics.jsonl").read_bytes()
    for path in checkpoints(run.out):
        (path / "optimizer.safetensors").unlink()
    other = dataclasses.replace(run, resume=True, settings=dataclasses.replace(run.settings, lr=0.5))
    with pytest.raises(ValueError, match="another configuration"):  # and nothing is set aside for that
        train(other)
    train(dataclasses.replace(run, resume=True))
    assert (run.out / "metrics.jsonl").read_bytes() == before
    assert capsys.readouterr().out.count("going on from the start") == 2


def test_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path, corpus: Path) -> None:
    run = resolve(config(tmp_path / "run", corpus, "transpose", steps=2, checkpoint_every=None))
    train(run)
    path = checkpoints(run.out)[-1]
    other = build_model(resolve(config(tmp_path, corpus, "pit-frozen")))
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"does not fit the model: interface"):
        load_checkpoint(path, other, None, run.as_json())
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_failed_save_leaves_no_checkpoint(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        if path.name.startswith("optimizer"):
            raise OSError("disk full")

    monkeypatch.setattr("manifold_tying.training._tensors.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        train(config(tmp_path / "run", corpus, steps=2))
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.parametrize("name", ["blocks.1.mlp.down.weight", "interface.parametrizations.memory.original"])
def test_nan_names_the_parameter(name: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's gradient is not in the norm that is clipped."""
    real = build_model

    def poisoned(run: TrainConfig) -> Any:
        model = real(run)
        dict(model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))
        return model

    monkeypatch.setattr("manifold_tying.training._loop.build_model", poisoned)
    expected = rf"step 1 of pit-trainable, seed 0: the loss is .* gradient of parameter {re.escape(name)} holds NaN"
    with pytest.raises(ValueError, match=expected):
        train(config(tmp_path / "run", corpus))


def test_an_evaluation_weighs_batches_by_their_tokens() -> None:
    """The last batch is shorter than the others."""
    ids = torch.arange(7.0)
    batches = [(ids[:4], ids[:4]), (ids[4:6], ids[4:6]), (ids[6:], ids[6:])]
    assert evaluate(lambda ids, _: ids.mean(), batches, torch.device("cpu"), Processes()) == ids.mean().item()


@pytest.mark.cuda
@pytest.mark.parametrize("interface", INTERFACES)
def test_cuda_trains_like_the_cpu(interface: str, tmp_path: Path, corpus: Path) -> None:
    """bfloat16 autocast against float32: the same course, not the same digits."""
    rows = [train(config(tmp_path / d, corpus, interface, steps=60, device=d)) for d in ("cpu", "cuda")]
    assert rows[1]["val_loss"] == pytest.approx(rows[0]["val_loss"], abs=0.1)
    assert rows[1]["defect"] is None or rows[1]["defect"] <= 1e-6


@pytest.mark.parametrize("steps", [2, 3, 180])
def test_the_last_step_is_small_in_short_runs_too(steps: int, tmp_path: Path) -> None:
    settings = resolve(TrainConfig(out=tmp_path, settings=Settings(steps=steps))).settings
    assert rate_factor(steps - 1, settings) == pytest.approx(FINAL_RATE)
