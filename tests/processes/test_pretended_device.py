"""The tests for CUDA on a device that is not there: CUDA's branches of the code, and its rules, on a CPU build of torch."""

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
# Each interface and each body once; no tables of gigabytes.
SELECTED = "not vocabulary_sized and not (poet and (transpose or untied or pit-frozen or pit-trainable or terms))"


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


def test_the_model_of_a_device_counts_what_a_step_launches() -> None:
    """Operations against 6 for each of 1.3 million parameters and each token, and attention and the chunked loss on top."""
    options = ("--preset", "nano", "--interface", "transpose", "--sequence-length", "128", "--tokens", "8192")
    page = run("benchmarks.device_model", *options)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    operations = 1e12 * sum(float(row[3]) for row in rows[1:3])
    assert 1 <= operations / (6 * 1.3e6 * 8192) <= 2
    assert all(row[6] == "none" for row in rows[1:4]), "the host waits for nothing"


@pytest.mark.slow
def test_the_tests_for_cuda_pass_on_a_pretended_device() -> None:
    tests = ("unit/test_cuda.py", "pretended_planted.py")
    plugins = ("-p", "pretended_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
    passed = re.search(
        r"(\d+) passed", run("pytest", "-q", *plugins, *(str(TESTS / test) for test in tests), "-k", SELECTED)
    )
    assert passed and int(passed[1]) > 60
