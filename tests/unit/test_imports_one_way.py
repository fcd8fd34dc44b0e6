"""The packages import one way, and each keeps its private modules to itself."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import manifold_tying

ROOT = Path(manifold_tying.__file__).parent
# What each package or module at the top builds on, beside what those build on.
BUILDS_ON = {
    "precision": "", "_extra": "", "_json": "", "_geoopt": "", "_transformers": "",
    "autograd": "precision _extra _json _geoopt", "distributed": "precision _extra _json _geoopt",
    "linalg": "autograd distributed", "manifolds": "linalg", "parametrizations": "manifolds",
    "poet": "parametrizations", "optim": "poet",
    "tying": "parametrizations", "huggingface": "tying _transformers", "models": "tying",
    "diagnostics": "optim huggingface models", "testing": "optim huggingface models", "recipe": "optim huggingface models",
    "training": "diagnostics recipe", "cli": "training", "__main__": "cli", "__init__": "training testing cli",
}  # fmt: skip
KNOWN: set[tuple[str, str]] = set()


@functools.cache
def below(package: str) -> frozenset[str]:
    direct = BUILDS_ON[package].split()
    return frozenset(direct).union(*map(below, direct))


def imported() -> Iterator[tuple[str, list[str]]]:
    """(module, the parts of an imported name below manifold_tying): also in functions and as text."""
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").as_posix()
        folder = path.relative_to(ROOT.parent).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                near = folder[: len(folder) - node.level + 1] if node.level else ()
                names = [".".join([*near, *filter(None, [node.module]), alias.name]) for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
                names = [node.value]  # importlib.import_module
            for name in names:
                package, *parts = name.split(".")
                if package == ROOT.name and parts and all(part.isidentifier() for part in parts):
                    yield module, parts


def test_packages_import_one_way() -> None:
    edges = {(module.split("/")[0], parts[0]) for module, parts in imported()}
    wrong = {(a, b) for a, b in edges if a != b and b not in below(a)}
    assert wrong == KNOWN and {a for a, _ in edges} <= BUILDS_ON.keys()


def test_private_modules_stay_in_their_package() -> None:
    found = [
        (module, ".".join(parts))
        for module, parts in imported()
        if parts[0] != module.split("/")[0] and any(part.startswith("_") for part in parts[1:])
    ]
    assert not found
