"""The kernels compile for a GPU, in a process of its own: here Triton has been told to interpret them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_each_kernel_compiles(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).resolve().parents[1] / "compile_kernels.py"
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"cross_entropy_kernel", "permuted_transpose", "cubic_gradient"} <= set(result.stdout.split())
