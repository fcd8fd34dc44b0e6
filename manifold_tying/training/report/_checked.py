"""JSON from disk, checked: every complaint names the file, the place in it and what to do."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manifold_tying._json import NotJSON, parsed, read_bytes

AGAIN = "run the command that wrote the folder again"


def json_of(path: Path) -> Any:
    """What a .json file holds."""
    try:
        return parsed(_text(path))
    except NotJSON as error:
        place = f"{path}" if error.line is None else f"{path}, line {error.line}"
        raise ValueError(f"{place}: not JSON ({error.reason}); {AGAIN}") from None


def lines_of(path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """The objects of a .jsonl file: numbers under the required keys, numbers or null or nothing under the optional."""
    for count, text in enumerate(_text(path).splitlines(), start=1):
        where = f"{path}, line {count}"
        try:
            line = object_of(parsed(text), where)
        except NotJSON as error:
            raise ValueError(f"{where}: not JSON ({error.reason}); a run that was cut short? {AGAIN}") from None
        for key in required:
            check_number(line.get(key), key, where)
        for key in optional:
            if line.get(key) is not None:
                check_number(line[key], key, where)
        yield line


def object_of(value: object, where: str) -> Mapping[str, Any]:
    """The value; ValueError where it is no object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {kind_of(value)}; {AGAIN}")
    return value


def text_under(values: Mapping[str, Any], key: str, where: str) -> str:
    """The string under a key; ValueError where there is none."""
    if not isinstance(text := values.get(key), str):
        raise ValueError(f"{where}: expected a string under {key!r}, got {text!r}; {AGAIN}")
    return text


def check_number(value: object, key: str, where: str) -> None:
    """ValueError where the value is no number."""
    # bool is an int to Python, and not a measurement; NaN and infinity are: they are how a run diverges
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number under {key!r}, got {value!r}; {AGAIN}")


def kind_of(value: object) -> str:
    """As JSON calls it where that is shorter."""
    return "null" if value is None else type(value).__name__


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: not the folder of a finished run or ablation? give its --out, or {AGAIN}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {AGAIN}") from None
