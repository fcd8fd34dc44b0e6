"""The wheel: what it holds, and that it works in an empty environment."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT))
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {"manifold_tying/optim/_adam.py", "manifold_tying/models/_llama.py", "manifold_tying/py.typed"} <= set(names)
    assert {f"manifold_tying/training/report/{name}" for name in ("page.html", "report.css", "report.js")} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"manifold_tying", next(top for top in tops if top.endswith(".dist-info"))}


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    pins = str(ROOT / "constraints.txt")
    quiet = ("--quiet", "--disable-pip-version-check")
    # torch by itself first, as in the Makefile: whatever comes after finds it there
    run(python, "-m", "pip", "install", *quiet, "--constraint", pins, "torch")
    run(python, "-m", "pip", "install", *quiet, "--constraint", pins, str(wheel))
    program = (
        "import torch, manifold_tying as mt\n"
        "from manifold_tying.optim import RiemannianAdam, param_groups\n"
        "from manifold_tying.models import Llama, preset\n"
        "layer = mt.stiefel(torch.nn.Linear(4, 8))\n"
        "optimizer = RiemannianAdam(param_groups(layer), lr=0.1)\n"
        "layer(torch.randn(3, 4)).square().sum().backward()\n"
        "optimizer.step()\n"
        "print(mt.linalg.defect(layer.weight).item() < 1e-6, mt.__file__)\n"
    )
    assert run(python, "-c", program, cwd=tmp_path).startswith(f"True {environment}")
    command = [str(environment / "bin" / "manifold-tying"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'manifold-tying[train]'" in done.stderr
    assert "Traceback" not in done.stderr
