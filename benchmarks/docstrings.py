"""A corpus for continued pretraining that any machine can make again: the docstrings of packages that constraints.txt pins.

    python -m benchmarks.docstrings runs/docstrings.jsonl

One line per module: its docstrings and those of its classes and functions, in the order of the source. Tests are left out.
"""

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "pandas", "sympy")
SHORTEST = 200  # characters of a module's docstrings that are worth a document


def documents(packages: tuple[str, ...] = PACKAGES) -> Iterator[str]:
    """The docstrings of each module, modules in the order of their paths."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"{package} is not installed; pip install -c constraints.txt {' '.join(packages)}")
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            if "tests" not in file.relative_to(root).parts:
                text = "\n\n".join(docstrings(file.read_text(encoding="utf-8")))
                if len(text) >= SHORTEST:
                    yield text


def docstrings(source: str) -> Iterator[str]:
    """Those of a module and of everything in it, outer ones first."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def main(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    count = characters = 0
    with out.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            count, characters = count + 1, characters + len(text)
    print(f"{count} documents, {characters:,} characters: {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m benchmarks.docstrings OUT.jsonl\n\n{__doc__}")
    main(Path(sys.argv[1]))
