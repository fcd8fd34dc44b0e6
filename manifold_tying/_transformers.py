"""Register the loader of converted checkpoints with transformers, without importing transformers, which takes seconds.

transformers has no entry point for quantizers, so an import hook of wrapt (extra ``huggingface``) registers the loader. The
hook never raises. :func:`import_transformers` raises the error once the user needs transformers.
"""

import importlib
import logging
import sys
from contextlib import suppress
from typing import Any

_OLDEST = 5  # major version; 4.x has neither `all_tied_weights_keys` nor dicts of tied names


def import_transformers() -> Any:
    """Import transformers and register our loader; ModuleNotFoundError if transformers is missing or too old."""
    how = "install the extra: pip install 'manifold-tying[huggingface]' (from a checkout: pip install '.[huggingface]')"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {how}", name=error.name) from error
    if _too_old():
        raise ModuleNotFoundError(
            f"expected transformers >= {_OLDEST}.0, found {transformers.__version__}; {how}", name="transformers"
        )
    importlib.import_module("manifold_tying.huggingface.loader")  # the import registers it
    return transformers


def register_with_transformers() -> None:
    """Register the loader now if transformers is imported already, otherwise right after its import."""
    with suppress(ModuleNotFoundError):
        from wrapt import register_post_import_hook

        register_post_import_hook(_try_to_register, "transformers.quantizers.auto")


def _too_old() -> bool:
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    major = version.partition(".")[0]
    return major.isdigit() and int(major) < _OLDEST


def _try_to_register(_: Any) -> None:
    if _too_old():
        return
    try:
        importlib.import_module("manifold_tying.huggingface.loader")
    except Exception:
        logging.getLogger(__name__).warning(
            "Cannot register converted checkpoints with transformers; AutoModel will not read them.", exc_info=True
        )
