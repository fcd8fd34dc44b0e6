"""Import transformers, an optional package, with a clear error."""

import importlib
from typing import Any

_OLDEST = 5  # major version; 4.x has neither `all_tied_weights_keys` nor dicts of tied names


def import_transformers() -> Any:
    """The module transformers; ModuleNotFoundError if it is missing or too old."""
    how = "install the extra: pip install 'manifold-tying[huggingface]' (from a checkout: pip install '.[huggingface]')"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {how}", name=error.name) from error
    if is_too_old(transformers.__version__):
        raise ModuleNotFoundError(
            f"expected transformers >= {_OLDEST}.0, found {transformers.__version__}; {how}", name="transformers"
        )
    return transformers


def is_too_old(version: str) -> bool:
    """Whether this version of transformers is older than the package needs."""
    major = version.partition(".")[0]
    return major.isdigit() and int(major) < _OLDEST
