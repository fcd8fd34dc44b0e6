"""Who may import whom: one way only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"precision", "autograd", "distributed"}
# layer: the layers of ours that it may import
ALLOWED = {
    "_extra": set(),
    "_geoopt": set(),
    "_json": set(),
    "_safetensors": {"_extra", "_json"},
    "precision": set(),
    "autograd": {"precision"},
    "distributed": {"precision"},
    "kernels": {"precision", "autograd"},
    "linalg": SHARED,
    "manifolds": {*SHARED, "linalg", "_geoopt"},
    "parametrizations": {*SHARED, "linalg", "manifolds", "_geoopt"},
    "poet": {*SHARED, "kernels", "linalg", "parametrizations", "_extra", "_json"},
    "tying": {*SHARED, "kernels", "linalg", "manifolds", "parametrizations"},
    "huggingface": {*SHARED, "linalg", "manifolds", "parametrizations", "tying", "_extra", "_json", "_safetensors"},
    "models": {*SHARED, "linalg", "manifolds", "parametrizations", "tying"},
    "optim": {*SHARED, "linalg", "manifolds", "parametrizations", "poet", "_extra", "_geoopt"},
    "recipe": {"precision", "optim", "tying"},
    "peft": {"autograd", "precision", "parametrizations", "poet", "_extra"},
    "lightning": {"optim", "_extra"},
    "diagnostics": {*SHARED, "linalg", "tying", "huggingface", "_extra", "_json", "_safetensors"},
    "testing": {*SHARED, "linalg", "manifolds", "parametrizations", "tying", "optim", "_extra"},
    "training": {
        *SHARED,
        *("linalg", "manifolds", "parametrizations", "poet", "tying", "huggingface", "models", "optim", "recipe"),
        *("diagnostics", "_json", "_extra", "_safetensors"),
    },
    "cli": {"training", "_extra"},
}


def files(layer: str) -> list[Path]:
    folder = ROOT / "manifold_tying" / layer
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert found
    return found


def imported_layers(source: str) -> set[str]:
    layers = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        layers |= {name.split(".")[1] for name in names if name.startswith("manifold_tying.")}
    return layers


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_imports_go_one_way(layer: str) -> None:
    for file in files(layer):
        used = imported_layers(file.read_text(encoding="utf-8")) - {layer}
        assert used <= ALLOWED[layer], f"{file} imports {used - ALLOWED[layer]}"


def test_the_check_sees_imports() -> None:
    source = (
        "import manifold_tying.training.cli\nfrom manifold_tying import optim\nfrom manifold_tying.models import Llama"
    )
    assert imported_layers(source) == {"training", "optim", "models"}


def test_relative_imports_stay_within_their_layer() -> None:
    for layer in ALLOWED:
        for file in files(layer):
            depth = len(file.relative_to(ROOT).parts) - 2
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                assert not (isinstance(node, ast.ImportFrom) and node.level > max(depth, 0)), file


def test_a_package_imports_another_by_its_init() -> None:
    for layer in ALLOWED.keys() - {"cli"}:  # the command line loads one command's module
        for file in files(layer):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                parts = (getattr(node, "module", None) or "").split(".")
                inside = parts[0] == "manifold_tying" and len(parts) > 2 and parts[1] not in (layer, "huggingface")
                assert not inside, f"{file} imports {'.'.join(parts)}"


def test_what_runs_on_a_gpu_needs_the_extras_that_contributing_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"tests/\S+\.py", next(line for line in page.splitlines() if "pytest -m cuda" in line)))
    texts = {file.relative_to(ROOT).as_posix(): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    assert named == {file for file, text in texts.items() if re.search(r"mark\.cuda\b", text)}
    others = re.compile(r"^(from|import) (transformers|huggingface_models|peft|trl|selenium|sklearn)", re.MULTILINE)
    assert not any(others.search(texts[file]) for file in named)
