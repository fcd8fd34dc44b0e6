"""A converted model in two processes, by accelerate and by torch: the losses of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_models import build
from parallel_worker import PROCESSES, losses

import manifold_tying as mt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, run_four_processes: Any) -> list[dict[str, list[float]]]:
    """What each process wrote."""
    folder: Path = tmp_path_factory.mktemp("accelerate")
    run_four_processes("parallel_worker.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "shard_model", "tensor parallel"])
def test_losses_are_those_of_one_process(kind: str, found: list[dict[str, list[float]]]) -> None:
    alone = losses(mt.convert(build()), None, 0, 1)
    together = [sum(each) / PROCESSES for each in zip(*(one[kind] for one in found), strict=True)]
    assert together == pytest.approx(alone, abs=2e-5) and alone[-1] < alone[0] - 0.1
