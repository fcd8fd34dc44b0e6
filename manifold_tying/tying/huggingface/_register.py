"""Makes transformers know converted checkpoints, as soon as transformers is there and no sooner: its import takes seconds."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_QUANTIZERS = "transformers.quantizers.auto"


def import_transformers() -> Any:
    """transformers, or ModuleNotFoundError that says what to install."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; install the extra: pip install 'manifold-tying[huggingface]' "
            "(from a checkout: pip install '.[huggingface]')",
            name=error.name,
        ) from error


def register() -> None:
    """Register the loader of converted checkpoints with transformers, now."""
    importlib.import_module("manifold_tying.tying.huggingface._quantizer")


def register_with_transformers() -> None:
    """:func:`register` where transformers is imported already, else right after it is."""
    if _QUANTIZERS in sys.modules:
        register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets the others find transformers' table of quantizers, and has it followed by ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _QUANTIZERS:
            return None
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
        self.loader.exec_module(module)
        register()
