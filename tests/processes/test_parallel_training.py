"""A run of several processes: the same losses as of one, checkpoints that any number reads, and how it fails."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import EVERY, RUNS, STEPS, config, lines, text

import manifold_tying as mt
from manifold_tying.cli import main
from manifold_tying.training import load_model, train
from manifold_tying.training.checkpoint import checkpoints

pytestmark = pytest.mark.slow
CASES = [(name, size) for name, (sizes, _, _) in RUNS.items() for size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_four_processes: Any) -> Path:
    """What the four processes left."""
    folder = tmp_path_factory.mktemp("runs")
    train(config(folder / "tokens are in the cache", text(folder), steps=1))
    run_four_processes("training_worker.py", folder)
    return folder


@cache
def alone(name: str, folder: Path) -> Path:
    """The same run by this process."""
    _, interface, settings = RUNS[name]
    out = folder / f"{name} alone"
    train(config(out, folder / "sums.txt", interface, **{**settings, "parallel": None}))
    return out


@pytest.mark.parametrize(("name", "size"), CASES)
def test_metrics_are_those_of_one_process(name: str, size: int, folder: Path) -> None:
    one, several = alone(name, folder), folder / f"{name} {size}"
    reference = lines(one)
    losses = [m["loss"] for m in reference]
    assert max(losses) - min(losses) > 0.02  # it moves, so that there is something to miss
    assert_same(lines(several), reference)
    for here, there in zip(lines(several, "probes.jsonl"), lines(one, "probes.jsonl"), strict=True):
        for weight, numbers in here["weights"].items():
            assert numbers["svd_entropy"] == pytest.approx(there["weights"][weight]["svd_entropy"], rel=1e-5)
            assert set(numbers) == set(there["weights"][weight])
    rows = [json.loads((run / "result.json").read_text()) for run in (one, several)]
    for key in ("arm", "seed", "tokens", "trainable_parameters"):
        assert rows[0][key] == rows[1][key]
    assert len(list(several.glob("events.out.tfevents.*"))) == 1  # one process writes


@pytest.mark.parametrize(("name", "size"), [("fsdp", 1), ("fsdp", 4), ("poet-fsdp", 1), ("poet-fsdp", 3)])
def test_saved_by_two_and_resumed_by_others(name: str, size: int, folder: Path) -> None:
    copy = folder / f"{name} 2 at {size}"
    if size == 1:
        _, interface, settings = RUNS[name]
        shutil.copytree(folder / f"{name} 2", copy)
        settings = {**settings, "parallel": None}
        train(config(copy, folder / "sums.txt", interface, resume_from="step-00000006", **settings))
    assert_same(lines(copy), lines(alone(name, folder)))
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["aside-step-00000012", "step-00000006", "step-00000012"]


def test_export_writes_one_file_of_what_one_process_has(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    main(["export", str(folder / "fsdp 2"), str(tmp_path / "out")])
    exported = load_file(tmp_path / "out/model.safetensors")
    expected = load_file(alone("fsdp", folder) / "checkpoints/step-00000012/model.safetensors")
    assert set(exported) == set(expected)
    for key, tensor in expected.items():
        assert (exported[key] - tensor).abs().max() < 1e-4 * tensor.abs().max()
    sharded = load_model(folder / "fsdp 2").state_dict()
    assert all(torch.equal(sharded[key], tensor) for key, tensor in exported.items())
    tables, whole = mt.diagnostics.inspect_tables(folder / "fsdp 2"), mt.diagnostics.inspect_tables(tmp_path / "out")
    assert tables.E.shape == (299, 16) and tables.description == whole.description
    assert torch.equal(tables.E, whole.E) and torch.equal(tables.W_out, whole.W_out)


def test_inspect_names_a_shard_that_is_lost_or_damaged(folder: Path, tmp_path: Path) -> None:
    lost, damaged = (shutil.copytree(folder / "fsdp 2", tmp_path / name) for name in ("lost", "damaged"))
    (shard,) = lost.glob("checkpoints/step-00000012/shard-00002-*")
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks files .*{shard.name}"):
        mt.diagnostics.inspect_tables(lost)
    (shard,) = damaged.glob("checkpoints/step-00000012/shard-00002-*")
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"{shard.name} cannot be read"):
        mt.diagnostics.inspect_tables(damaged)


def test_errors_of_one_process_are_those_of_all(folder: Path) -> None:
    for rank in range(2):
        said = json.loads((folder / f"{rank}.json").read_text())
        for parallel in ("ddp", "fsdp"):
            assert "step 1 of pit-trainable, seed 0: the loss is" in said[f"nan {parallel}"]
        assert "parameter blocks.1.mlp.down.weight holds NaN" in said["nan ddp"]
        assert "the loss is nan" in said["nan fsdp"] and "blocks.0." in said["nan fsdp"]
        assert said["ablation"] == json.dumps(json.loads((folder / "ablation/summary.json").read_text()))
        stopped, finished = json.loads(said["ablation"])
        assert "step 1 of untied" in stopped["failed"] and finished["arm"] == "transpose" and finished["val_loss"] > 0
        for parallel in ("ddp", "fsdp"):
            assert "No space left on device" in said[f"full {parallel}"]
            full = folder / f"full {parallel}"
            assert not checkpoints(full) and not (full / "result.json").exists()
            assert lines(full)[-1]["step"] == STEPS  # the error of step 6 comes out where step 12 is to be saved
        assert "already holds a run" in said["again"]
        assert "parallel=none does not work with 2 processes" in said["none"]
        assert "one sequence per process" in said["few"]
        assert "shard-00002" in said["damaged"] and "--resume-from step-00000006" in said["damaged"]
        assert said["recovered"] == "nothing"
        assert (said["terminated"], said["after"]) == ("143", "nothing")
        assert (said["late"], said["after late"]) == ("143", "nothing")
    assert (folder / "damaged/checkpoints/aside-step-00000012").is_dir()
    assert_same(lines(folder / "damaged"), lines(folder / "fsdp 2"))


def test_terminated_run_was_saved_and_ends_as_the_others(folder: Path) -> None:
    assert_same(lines(folder / "terminated"), lines(folder / "fsdp 2"))
    assert_same(lines(folder / "terminated late"), lines(folder / "fsdp 2"))
    log = (folder / "log").read_text()
    assert "SIGTERM: saved step 4 of 12" in log  # its observer sent the signal after step 3
    assert "SIGTERM: saved step 12 of 12, whose evaluation the resumed run repeats" in log


def assert_same(metrics: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1)) and 0 < EVERY < STEPS
    for here, there in zip(metrics, reference, strict=True):
        assert set(here) == set(there)
        for key in ("loss", "val_loss"):
            if key in there:
                assert here[key] == pytest.approx(there[key], rel=1e-5)
        if there.get("defect") is not None:
            assert here["defect"] <= 1e-6
