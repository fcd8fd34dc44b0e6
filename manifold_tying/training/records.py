"""Read and check a run's JSON files; each error names the file, the line and what to do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manifold_tying._json import NotJSON, parsed, read_bytes

AGAIN = "run the command that wrote the folder again"


def read_lines(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """The objects of a .jsonl file. Required keys hold numbers; optional keys hold a number or null, or are missing."""
    for count, text in enumerate(_content(path).splitlines(), start=1):
        where = f"{path}, line {count}"
        try:
            line = as_object(parsed(text), where)
        except NotJSON as error:
            raise ValueError(f"{where}: not JSON ({error}); was the run interrupted? {AGAIN}") from None
        for key in (*required, *(key for key in optional if line.get(key) is not None)):
            as_number(line.get(key), key, where)
        yield line


def read_json(path: Path) -> Any:
    try:
        return parsed(_content(path))
    except NotJSON as error:
        raise ValueError(f"{path}: not JSON ({error}); {AGAIN}") from None


def _content(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the --out of a finished run or ablation, or {AGAIN}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {AGAIN}") from None


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {type_name(value)}; {AGAIN}")
    return value


def as_text(values: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(text := values.get(key), str):
        raise ValueError(f"{where}: expected a string under {key!r}, got {text!r}; {AGAIN}")
    return text


def as_number(value: Any, key: str, where: str) -> float:
    # In Python bool is an int. NaN and infinity are valid: they come from a diverged run.
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > 1e300):
        raise ValueError(f"{where}: expected a number under {key!r}, got {value!r}; {AGAIN}")
    return value


def type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
