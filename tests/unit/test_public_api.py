"""The public names, their parameters and defaults are those of tests/data/api.txt.

If a change is meant, record it: `make api`, and say so in CHANGELOG.md.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

import manifold_tying

RECORD = Path(__file__).resolve().parents[1] / "data/api.txt"
PACKAGES = sorted((*manifold_tying._PACKAGES, "lightning", "peft", "testing", "training"))


def described(name: str, value: Any) -> list[str]:
    """A line for a function or a class, and for each public method that the class defines."""
    if not callable(value):
        return [name]
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # a type alias
        return [name]
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown: list[str] = []
    named = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not named:
            shown, named = [*shown, "*"], True
        named |= p.kind is p.VAR_POSITIONAL
        default = "" if p.default is p.empty else f"={getattr(p.default, '__name__', None) or repr(p.default)}"
        shown.append(stars.get(p.kind, "") + p.name + default)
    lines = [f"{name}({', '.join(shown)})"]
    if inspect.isclass(value):
        for key, own in sorted(vars(value).items()):
            # torch.optim puts a wrapper of ``step`` into a class when it is used
            if not key.startswith("_") and getattr(own, "__qualname__", value.__name__).startswith(value.__name__):
                bound = getattr(value, key)
                lines += described(f"{name}.{key}", bound if callable(bound) else own)
    return lines


def public_api() -> str:
    lines = [f"manifold_tying.{name}" for name in sorted(manifold_tying.__all__)]
    for package in PACKAGES:
        module = importlib.import_module(f"manifold_tying.{package}")
        for name, value in sorted(vars(module).items()):
            of = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and not inspect.ismodule(value) and of.startswith(module.__name__):
                lines += described(f"manifold_tying.{package}.{name}", value)
    return "\n".join(lines) + "\n"


def test_the_public_api_is_the_recorded_one() -> None:
    recorded, found = RECORD.read_text(encoding="utf-8").splitlines(), public_api().splitlines()
    gone, new = sorted(set(recorded) - set(found)), sorted(set(found) - set(recorded))
    assert not gone and not new, f"gone: {gone}; new: {new}. If that is meant: make api"


if __name__ == "__main__":
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(public_api(), encoding="utf-8")
