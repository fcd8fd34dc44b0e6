"""Many processes against one: points as row-sharded DTensors, models under FSDP2 and DDP, tables split by vocabulary.

Four processes on loopback run tests/distributed_worker.py once (conftest.py); what groups of 1, 2, 3 and 4 of them found is
compared with what this process computes without any of it.
"""

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from distributed_models import (
    FEW,
    KINDS,
    MERGE_EVERY,
    PROCESSES,
    RUNS,
    SHAPES,
    SOME,
    STEPS,
    D,
    V,
    build,
    steps_of,
    train,
)
from machine import lacking

import manifold_tying as mt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, run_four_processes: Any) -> list[dict[str, Any]]:
    """What each process wrote."""
    folder = tmp_path_factory.mktemp("processes")
    run_four_processes("distributed_worker.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@cache
def trained_alone(arm: str) -> tuple[Any, list[float]]:
    """The model of one process without DTensors, and its losses."""
    model = build(arm)
    return model, train(model, model.loss)


def alone(arm: str) -> list[float]:
    return trained_alone(arm)[1]


@pytest.mark.parametrize(
    ("arm", "layout", "size"), [(arm, layout, size) for (arm, layout), sizes in RUNS.items() for size in sizes]
)
def test_losses_are_those_of_one_process(arm: str, layout: str, size: int, found: list[dict[str, Any]]) -> None:
    assert alone(arm)[-1] < alone(arm)[0] - 0.1  # it learns, so that there is something to miss
    for rank in range(size):
        result = found[rank][f"{arm} {layout} {size}"]
        assert_same_losses(result["losses"], alone(arm)[: steps_of(layout)])
        if "defect" in result:
            assert result["defect"] <= 1e-6 and abs(result["sharded defect"] - result["defect"]) < 1e-9


@pytest.mark.parametrize(
    ("layout", "size"), [(layout, size) for layout in ("fsdp", "ddp") for size in RUNS["poet", layout]]
)
def test_merges_agree_without_a_broadcast(layout: str, size: int, found: list[dict[str, Any]]) -> None:
    part = trained_alone("poet")[0].blocks[0].mlp.up.parametrizations.weight[0]
    assert part.merges == STEPS // MERGE_EVERY and part.merges > 0
    results = [found[rank][f"poet {layout} {size}"] for rank in range(size)]
    for result in results:
        assert result["order"] == part.out_places.tolist()
        assert result["base"] == results[0]["base"]  # bit for bit
        torch.testing.assert_close(torch.tensor(result["base"]), part.base.flatten()[:20], rtol=0, atol=1e-5)


def test_checkpointed_blocks_have_the_same_losses(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert_same_losses(found[rank]["pit-trainable checkpointed 2"]["losses"], alone("pit-trainable")[:FEW])


@pytest.mark.parametrize("size", SOME)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_points_move_as_on_one_process(
    shape: tuple[int, int], kind: str, size: int, found: list[dict[str, Any]]
) -> None:
    for rank in range(size):
        result = found[rank][f"moved {size}"][f"{shape} {kind}"]
        assert result["error"] < 1e-5 < 1e-2 < result["way"] and result["defect"] <= 1e-6


def test_a_step_sums_two_gram_matrices_and_gathers_nothing(found: list[dict[str, Any]]) -> None:
    for shape in SHAPES:
        square = shape[1] ** 2
        made = [square, square]  # each point is checked when the optimizer is made
        step = [1, 2 * square, 2 * square]  # whether all is finite; XᵀG and YᵀY of both points at once
        if shape == (150, 130):  # nearly square, so that steps of this length lose digits: once more for YᵀY
            step.append(2 * square)
        for size in SOME:
            assert found[0][f"moved {size}"][f"{shape} element"]["sums"] == made + 3 * step


@pytest.mark.parametrize("size", SOME)
def test_from_the_meta_device_come_the_weights_of_one_process(size: int, found: list[dict[str, Any]]) -> None:
    interfaces = {
        "untied": (mt.Untied(V, D), 0.0), "pit-trainable": (mt.PIT(V, D, memory="frozen"), 2e-7),
        "pit-free": (mt.PIT(V, D, std=0.3), 0.0),
    }  # fmt: skip
    for arm, (expected, tolerance) in interfaces.items():
        torch.manual_seed(5)
        expected.reset_parameters()  # type: ignore[operator]
        for rank in range(size):
            result = found[rank][f"{arm} from meta {size}"]
            assert all(result["types"])
            torch.manual_seed(5)
            model = build(arm)
            torch.manual_seed(5)
            model.interface.reset_parameters()  # type: ignore[operator]
            model.reset_parameters()
            assert result["body"] == model.get_parameter("blocks.0.attention.query.weight").tolist()
            for table, name in zip(expected.materialize(), ("E", "W_out"), strict=True):
                torch.testing.assert_close(torch.tensor(result[name]), table, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", SOME)
@pytest.mark.parametrize(("what", "bound"), [("scores", 1e-5), ("second derivatives", 1e-12)])
def test_a_split_vocabulary(what: str, bound: float, size: int, found: list[dict[str, Any]]) -> None:
    if what == "second derivatives" and torch.__version__ < "2.13":
        lacking("this torch's DTensor.to_local has no second derivative")
    for rank in range(size):
        assert max(found[rank][f"{what} {size}"].values()) < bound


@pytest.mark.parametrize("size", SOME)
def test_all_processes_agree_on_what_is_not_finite(size: int, found: list[dict[str, Any]]) -> None:
    for rank in range(size):
        result = found[rank][f"not finite {size}"]
        assert "parameter Z holds NaN" in result["raise"]["said"] and result["skip"]["said"] == ""
        assert result["raise"]["unchanged"] and result["skip"]["unchanged"]


def test_factors_stay_float32_under_a_policy(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        result = found[rank]["low precision 2"]
        assert result["seen"] == {"Z": "torch.float32", "L": "torch.float32", "up": "torch.bfloat16"}
        assert result["losses"] == pytest.approx(alone("pit-trainable")[:3], rel=2e-3)


def test_constrained_layers_are_reset_while_sharded(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        result = dict(found[rank]["constrained 2"])
        assert result.pop("dtype") == "torch.bfloat16"
        assert max(result.values()) < 1e-6


def test_sharded_spheres_move_as_whole_ones_and_rows_sum_nothing(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        result = found[rank]["spheres 2"]
        assert max(one["error"] for one in result.values()) < 1e-6 < 1e-2 < min(one["way"] for one in result.values())
        finite = 1  # whether all gradients are finite; then both points at once
        assert result["columns 2"]["sums"] == [finite, 6, 6]  # gradient and retraction
        assert result["matrix 2"]["sums"] == [finite, 2, 2]
        for kind in ("rows 2", "rows 3", "columns 3", "matrix 3"):
            assert result[kind]["sums"] == [finite]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("columns", r"sharded by rows, Shard\(0\)"),
        ("qr", "only retraction 'polar'"),
        ("spd", "works on Stiefel and Sphere only, got SPD"),
        ("subclass", "works on Stiefel and Sphere only, got Own"),
        ("mixed", "distributed alike"),
        ("rank", "full column rank"),
        ("policy", "torch.autocast"),
        ("methods", "no method losses"),
        ("constrained after", "constrain it first, then shard"),
        ("materialized", "is a DTensor"),
        ("id", "expected token ids from 0 to 8"),
    ],
)
def test_wrong_uses_are_refused(use: str, message: str, found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert re.search(message, found[rank]["refusals 2"][use])


def test_a_forward_before_a_merge_changes_nothing(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        result = found[rank]["merged after a forward 2"]
        assert abs(result["before"] - result["after"]) < 1e-5 < 1e-2 < abs(result["before"])
        assert result["moments"] == 0


def test_points_are_found_without_groups(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert max(found[rank]["plain parameters 2"]) < 1e-6


def test_muon_orthogonalizes_whole_matrices(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["matrices by Muon 2"] < 1e-6


def test_sharded_parameters_with_a_scale_move_as_whole_ones(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        for error, way in found[rank]["scaled 2"].values():
            assert error < 1e-6 < 1e-2 < way


def test_moments_of_stacks_are_saved_with_their_matrices(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert found[rank]["stacks 2"] == 0


def assert_same_losses(losses: list[float], reference: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=1e-5, atol=0)
