"""The distributions: what they hold, and that they work without what the extras install."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from machine import lacking

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = {
    str(path.relative_to(ROOT)) for path in (ROOT / "manifold_tying").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(source: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_of(wheel: Path) -> set[str]:
    """Files of the wheel without its metadata, each there once."""
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    return {name for name in names if ".dist-info/" not in name}


def test_distributions_hold_the_package_and_nothing_else_to_import(wheel: Path) -> None:
    assert modules_of(wheel) == PACKAGE and "manifold_tying/optim/adam.py" in PACKAGE
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2]: member for name in archive.getnames() if (member := archive.getmember(name))}
    assert PACKAGE <= held.keys() and not [name for name, member in held.items() if member.issym()]


def test_a_checkout_without_symbolic_links_builds_the_same(wheel: Path, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        lacking("not a checkout")
    listed = run("git", "ls-files", "--stage", cwd=ROOT).splitlines()
    for mode, name in ((line.split()[0], line.partition("\t")[2]) for line in listed):
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if mode == "120000":
            copy.write_text(os.readlink(ROOT / name))  # what git leaves where it cannot make links
        elif (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, copy)
    assert (tmp_path / "source/optim").read_text() == "manifold_tying/optim"
    assert modules_of(build(tmp_path / "source", tmp_path / "dist")) == modules_of(wheel)


def test_the_top_of_the_repository_links_to_the_package() -> None:
    for name in ("optim", "models"):
        assert (ROOT / name).resolve() == ROOT / "manifold_tying" / name


def test_an_editable_install_shows_the_package_alone(tmp_path: Path) -> None:
    program = "import importlib.util as u; print([n for n in ('manifold_tying', 'optim', 'models') if u.find_spec(n)])"
    assert run(sys.executable, "-P", "-c", program, cwd=tmp_path).strip() == "['manifold_tying']"


def test_the_wheel_works_without_the_extras(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, with the packages that it requires and none of those that its extras do."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    needs = [
        line.removeprefix("Requires-Dist: ") for line in metadata.read_text().splitlines() if "Requires-Dist" in line
    ]
    required, extras = (
        {re.split(r"[<>=;\[ ]", need)[0] for need in needs if ("extra ==" in need) == extra} for extra in (False, True)
    )
    assert required == {"torch", "geoopt", "numpy", "scipy"}
    absent = extras - {"manifold-tying", "pytest", "pytest-xdist", "build", "hatchling", "mypy", "ruff"}
    program = (
        f"import sys; sys.modules |= dict.fromkeys({sorted(absent)}); sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, manifold_tying as mt\n"
        "from manifold_tying.optim import RiemannianAdam, param_groups\n"
        "from manifold_tying.models import Llama, preset\n"
        "layer = mt.stiefel(torch.nn.Linear(4, 8))\n"
        "optimizer = RiemannianAdam(param_groups(layer), lr=0.1)\n"
        "layer(torch.randn(3, 4)).square().sum().backward()\n"
        "optimizer.step()\n"
        "print(mt.linalg.defect(layer.weight).item() < 1e-6, mt.__file__)\n"
        "for extra in ('testing', 'training'):\n"
        "    try:\n"
        "        __import__(f'manifold_tying.{extra}')\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
        "from manifold_tying.cli import main\n"
        "main(['train', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout.startswith(f"True {tmp_path}"), done.stderr
    assert "pip install 'manifold-tying[testing]'" in done.stdout
    assert all("install the extra: pip install 'manifold-tying[train]'" in said for said in (done.stdout, done.stderr))
