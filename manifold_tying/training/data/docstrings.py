"""A corpus of docstrings: prose about code, from installed packages."""

import ast
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "pandas", "sympy")  # installed with torch and the extra `train`
SHORTEST = 200  # fewest characters of a module's docstrings that make a document


def package_root(package: str) -> Path:
    """The folder of an installed package, without importing it; raises ValueError if it is missing."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise ValueError(f"expected the name of an installed package, got {package!r}; pip install it or leave it out")
    return Path(spec.origin).parent


def document(file: Path) -> str | None:
    """The docstrings of a module, its classes and functions, outer ones first; None if there is too little text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates, another version's syntax
        return None
    text = "\n\n".join(_docstrings(tree))
    return text if len(text) >= SHORTEST else None


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text
