"""Registers the loader of converted checkpoints with transformers, without importing transformers for it (seconds).

transformers has no entry point for quantizers, so wrapt, of the extra ``huggingface``, waits for its table of them. Nothing is
raised there: what stops it is raised by :func:`import_transformers`, where the user asked for transformers.
"""

import importlib
import logging
import sys
from contextlib import suppress
from typing import Any

_OLDEST = 5  # major version; 4.x has neither `all_tied_weights_keys` nor dicts of tied names


def import_transformers() -> Any:
    """transformers with our loader registered; ModuleNotFoundError that says what to install where it is missing or too old."""
    how = "install the extra: pip install 'manifold-tying[huggingface]' (from a checkout: pip install '.[huggingface]')"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {how}", name=error.name) from error
    if _too_old():
        raise ModuleNotFoundError(
            f"expected transformers >= {_OLDEST}.0, found {transformers.__version__}; {how}", name="transformers"
        )
    _register()
    return transformers


def register_with_transformers() -> None:
    """Register the loader where transformers is imported already, else right after it is."""
    with suppress(ModuleNotFoundError):
        from wrapt import register_post_import_hook

        register_post_import_hook(_try_to_register, "transformers.quantizers.auto")


def _register() -> None:
    importlib.import_module("manifold_tying.huggingface.loader")  # registers by being imported


def _too_old() -> bool:
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    major = version.partition(".")[0]
    return major.isdigit() and int(major) < _OLDEST


def _try_to_register(_: Any) -> None:
    if _too_old():
        return
    try:
        _register()
    except Exception:
        logging.getLogger(__name__).warning(
            "Cannot register converted checkpoints with transformers; AutoModel will not read them.", exc_info=True
        )
