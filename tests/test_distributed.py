"""Many processes against one: points as row-sharded DTensors, models under FSDP2 and DDP, tables split by vocabulary.

Four processes on loopback run tests/distributed_worker.py once; the tests here compare what groups of 1, 2, 3 and 4 of them
found with what this process computes without any of it.
"""

import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_worker import (
    ARMS,
    KINDS,
    PROCESSES,
    SHAPES,
    STEPS,
    D,
    V,
    build,
    move,
    points,
    train,
)

import manifold_tying as mt

pytestmark = pytest.mark.slow
SIZES = range(1, PROCESSES + 1)
PATIENCE = 270  # seconds


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote."""
    folder = tmp_path_factory.mktemp("processes")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    program = Path(__file__).with_name("distributed_worker.py")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(PROCESSES)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            command = [sys.executable, str(program), str(rank), str(folder), str(store.port)]
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    try:
        end = time.monotonic() + PATIENCE
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
    finally:
        for p in processes:
            p.kill()
            p.wait()
    codes = [p.returncode for p in processes]
    assert codes == [0] * PROCESSES, "\n".join(
        f"{c}: {log.read_text()[-3000:]}" for c, log in zip(codes, logs, strict=True)
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@cache
def alone(arm: str) -> list[float]:
    """The losses of one process without DTensors."""
    model = build(arm)
    return train(model, model.loss)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["fsdp", "ddp", "vocabulary"])
@pytest.mark.parametrize("arm", ARMS)
def test_losses_are_those_of_one_process(arm: str, layout: str, size: int, found: list[dict[str, Any]]) -> None:
    reference = torch.tensor(alone(arm))
    assert (
        len(reference) == STEPS and reference[-1] < reference[0] - 0.1
    )  # it learns, so that there is something to miss
    for rank in range(size):
        result = found[rank][f"{arm} {layout} {size}"]
        torch.testing.assert_close(torch.tensor(result["losses"]), reference, rtol=1e-5, atol=0)
        if "defect" in result:
            assert result["defect"] <= 1e-6 and abs(result["sharded defect"] - result["defect"]) < 1e-9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_points_move_as_on_one_process(
    shape: tuple[int, int], kind: str, size: int, found: list[dict[str, Any]]
) -> None:
    start = points(shape)
    expected = move(start, kind)
    for rank in range(size):
        result = found[rank][f"moved {size}"][f"{shape} {kind}"]
        for X, before, here in zip(expected, start, result["points"], strict=True):
            torch.testing.assert_close(torch.tensor(here), X, rtol=0, atol=1e-5)
            assert not torch.allclose(X, before, atol=1e-2)
        assert result["defect"] <= 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_sums_two_gram_matrices_and_gathers_nothing(shape: tuple[int, int], found: list[dict[str, Any]]) -> None:
    square = shape[1] ** 2
    one_step = [1, 2 * square, 2 * square]  # whether all is finite; XᵀG and YᵀY of both points at once
    for size in SIZES:
        sums = found[0][f"moved {size}"][f"{shape} element"]["sums"]
        assert sums == [square, square] + 5 * one_step  # each point is checked when the optimizer is made


@pytest.mark.parametrize("size", SIZES)
def test_from_the_meta_device_come_the_weights_of_one_process(size: int, found: list[dict[str, Any]]) -> None:
    for arm, tolerance in (("untied", 0.0), ("pit-trainable", 2e-7)):
        torch.manual_seed(5)
        expected = mt.Untied(V, D) if arm == "untied" else mt.PIT(V, D)
        for rank in range(size):
            result = found[rank][f"{arm} from meta {size}"]
            assert all(result["types"])
            for table, name in zip(expected.materialize(), ("E", "W_out"), strict=True):
                torch.testing.assert_close(torch.tensor(result[name]), table, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_logits_of_a_split_vocabulary(size: int, found: list[dict[str, Any]]) -> None:
    for rank in range(size):
        assert max(found[rank][f"scores {size}"].values()) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_agree_on_what_is_not_finite(size: int, found: list[dict[str, Any]]) -> None:
    for rank in range(size):
        result = found[rank][f"not finite {size}"]
        assert "parameter Z holds NaN" in result["raise"]["said"] and result["skip"]["said"] == ""
        assert result["raise"]["unchanged"] and result["skip"]["unchanged"]


def test_factors_stay_float32_under_a_policy(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        result = found[rank]["low precision 2"]
        assert result["seen"] == {"Z": "torch.float32", "L": "torch.float32", "up": "torch.bfloat16"}
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(alone("pit-trainable")[:3]), rtol=2e-3, atol=0
        )


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("columns", r"sharded by rows, Shard\(0\)"),
        ("qr", "only retraction 'polar'"),
        ("spd", "works on Stiefel only"),
        ("mixed", "distributed alike"),
        ("rank", "full column rank"),
        ("policy", "torch.autocast"),
    ],
)
def test_wrong_uses_are_refused(use: str, message: str, found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert re.search(message, found[rank]["refusals 2"][use])


def assert_same_losses(losses: list[float], reference: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=1e-5, atol=0)
