"""Registers the loader of converted checkpoints with transformers, without importing transformers for it (seconds).

transformers has no entry point for quantizers, so an import hook waits for its table of them. The hook never raises: what
stops it is raised by :func:`import_transformers`, where the user asked for transformers.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_QUANTIZERS = "transformers.quantizers.auto"
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
    importlib.import_module("manifold_tying.tying.huggingface._quantizer")  # registers by being imported
    return transformers


def register_with_transformers() -> None:
    """Register the loader where transformers is imported already, else right after it is."""
    if _QUANTIZERS in sys.modules:
        _try_to_register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _too_old() -> bool:
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    major = version.partition(".")[0]
    return major.isdigit() and int(major) < _OLDEST


def _try_to_register() -> None:
    if _too_old():
        return
    try:
        importlib.import_module("manifold_tying.tying.huggingface._quantizer")
    except Exception:
        logging.getLogger(__name__).warning(
            "Cannot register converted checkpoints with transformers; AutoModel will not read them.", exc_info=True
        )


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets the others find transformers' table of quantizers, and registers after it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _QUANTIZERS:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _try_to_register()
