"""The ``quantization_config`` entry in config.json of a converted checkpoint."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from manifold_tying.manifolds import Retraction
from manifold_tying.parametrizations import Diagonal
from manifold_tying.tying._pit import Memory

METHOD = "manifold-tying"
"""``quant_method`` in config.json; selects this package in transformers."""
FORMAT = 2
"""Format 1 stored the embedding's empty weight with shape (0,) instead of (V, 0)."""
REQUIRES = "manifold-tying[huggingface]"
"""config.json's ``requires`` entry: the package needed to read the tables."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_scale(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value != 0


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)) and 0 < value[0] < value[1]
    )


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, str) and value in names), "one of " + ", ".join(map(repr, names))


_IS_BOOL = (lambda value: isinstance(value, bool)), "true or false"
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "memory": _one_of(get_args(Memory)),
    "retraction": _one_of(get_args(Retraction)),
    "diagonal": _one_of(get_args(Diagonal)),
    "bounds": ((lambda value: value is None or _is_pair(value)), "null or two positive numbers in ascending order"),
    "bridge": _IS_BOOL,
    "scale": (_is_scale, "a finite number other than 0"),
    "padding_idx": ((lambda value: value is None or _is_index(value)), "null or a token id"),
    "rotated": _IS_BOOL,
}
_NOT_FREE = {"retraction", "diagonal", "bounds"}  # a free table has none of them
_OPTIONAL = {"rotated"}  # missing from checkpoints of early versions


def check_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a complete entry; ValueError names the unknown, missing or wrong option."""
    if (version := entry.get("format")) not in (1, FORMAT) or isinstance(version, bool):
        raise ValueError(
            f"expected a converted checkpoint of format 1 or {FORMAT}, got {version!r:.80}; install a newer manifold-tying"
        )
    options = check_options({name: value for name, value in entry.items() if name not in ("quant_method", "format")})
    unused = _NOT_FREE if options.get("memory") == "free" else set()
    if missing := _OPTIONS.keys() - _OPTIONAL - unused - options.keys():
        raise ValueError(f"quantization_config lacks {', '.join(sorted(missing))}; save the converted model again")
    return dict(entry)


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of an interface; ValueError for an unknown option or an invalid value."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r:.80} in quantization_config; expected {', '.join(_OPTIONS)}")
        known, expected = _OPTIONS[name]
        if not known(value):
            raise ValueError(f"expected {expected} as {name} in quantization_config, got {value!r:.80}")
    return dict(options)
