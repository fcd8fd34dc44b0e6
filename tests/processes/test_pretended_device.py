"""The tests for CUDA on a device that is not there: CUDA's branches of the code, and its rules, on a CPU build of torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import lacking

TESTS = Path(__file__).resolve().parents[1]
# Each interface and each body once; no tables of gigabytes, nor what such a device does not do.
SELECTED = (
    "not (real_device or vocabulary_sized or poet and (transpose or untied or pit-frozen or pit-trainable or terms))"
)

PHASES = ("forward", "backward", "step")


def run(*arguments: str) -> str:
    if torch.cuda.is_available():
        pytest.skip("there is a real device")
    if shutil.which("g++") is None:
        lacking("no C++ compiler here, which the device guard needs; apt-get update && apt-get install -y g++")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    found = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    return found.stdout


def test_the_model_of_a_device_counts_what_a_step_launches(tmp_path: Path) -> None:
    """Whole steps, POET layers and the Riemannian step, against times that are made up."""
    arguments = {
        "training_step": "--preset nano --tokens 8192 --dtype bfloat16 --only transpose",
        "equivalence": "--quick",
        "riemannian_step": "--quick --rows 'V=96 d'",
    }
    labels = "nano plain, 8192 tokens in sequences of 128, eager", "24x40 b=8 N=32", "V=96 d=8"
    for (name, options), label in zip(arguments.items(), labels, strict=True):
        times = {contender: {"milliseconds": 1e3} for contender in ("transpose", "ours", "ours block", "nn.Linear")}
        row = {"row": label, "command": f"python -m benchmarks.{name} {options}", "contenders": times}
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": name, "rows": [row]}))
    page = run("benchmarks.device_model", "--check", *(str(tmp_path / f"{name}.json") for name in arguments))
    head, _, *lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    found = {line[1]: dict(zip(head, line, strict=True)) for line in lines}
    assert list(found) == ["transpose", "nn.Linear", "ours block", "ours"]
    # 6 for each of 1.3 million parameters and each token, and attention and the chunked loss on top
    assert 1 <= 1e12 * float(found["transpose"]["TFLOP"]) / (6 * 1.3e6 * 8192) <= 2
    for cells in found.values():
        assert cells["waits"] == "none" and float(cells["ratio"]) > 1
    assert int(found["ours block"]["kernels"]) > 5 * int(found["nn.Linear"]["kernels"]) > 0
    in_phases = {name: [float(cells[f"{part} ms"]) > 0 for part in PHASES] for name, cells in found.items()}
    assert in_phases["ours"] == [False, False, True] and in_phases["ours block"] == [True, True, False]
    assert in_phases["transpose"] == [True, True, True]


@pytest.mark.slow
def test_the_tests_for_cuda_pass_on_a_pretended_device() -> None:
    tests = ("unit/test_cuda.py", "pretended_planted.py")
    plugins = ("-p", "pretended_device", "-p", "no:cacheprovider", "-p", "no:xdist")
    found = run("pytest", "-q", *plugins, *(str(TESTS / test) for test in tests), "-k", SELECTED)
    passed = re.search(r"(\d+) passed", found)
    assert passed and int(passed[1]) > 60
