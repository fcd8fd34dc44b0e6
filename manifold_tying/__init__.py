"""Manifold-constrained parametrizations, Riemannian optimizers and Pseudo-Inverse Tying for PyTorch.

Docstrings cite two papers:

- PIT: "Rethinking Weight Tying: Pseudo-Inverse Tying for LM Stable Training and Updates", arXiv:2602.04556;
- POET: Qiu et al., "Reparameterized LLM Training via Orthogonal Equivalence Transformation", 2025, arXiv:2506.08001.
"""

import contextlib as _contextlib
import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from manifold_tying import diagnostics, huggingface, linalg, manifolds, models, optim, parametrizations, poet, tying
    from manifold_tying.huggingface import conversion_losses, convert, export, load, save
    from manifold_tying.manifolds import SPD, Sphere, Stiefel
    from manifold_tying.parametrizations import constrain, doubly_stochastic, isospectral, low_rank, materialize

    # isort: split
    from manifold_tying.parametrizations import orthogonal, project, spd, sphere, stiefel
    from manifold_tying.poet import equivalence, equivalence_, merge
    from manifold_tying.recipe import pit_groups, pit_schedule
    from manifold_tying.tying import PIT, TokenInterface, TransposeTying, Untied

__version__ = "0.1.0"

# Import public names on first use: geoopt takes half as long to import as torch. Type checkers read literal names only.
__all__ = ["diagnostics", "huggingface", "linalg", "manifolds", "models", "optim", "parametrizations", "poet", "tying"]
_PACKAGES = tuple(__all__)
_HOMES = ("manifolds", "parametrizations", "tying", "poet", "recipe", "huggingface")  # of the names below, light first
__all__ += ["SPD", "Sphere", "Stiefel"]
__all__ += ["constrain", "doubly_stochastic", "isospectral", "low_rank", "materialize", "orthogonal"]
__all__ += ["project", "spd", "sphere", "stiefel"]
__all__ += ["equivalence", "equivalence_", "merge", "pit_groups", "pit_schedule"]
__all__ += ["PIT", "TokenInterface", "TransposeTying", "Untied"]
__all__ += ["conversion_losses", "convert", "export", "load", "save"]

# Let transformers build converted models, once it is imported; importing it here would take seconds.
with _contextlib.suppress(ModuleNotFoundError):  # wrapt comes with the extra `huggingface`
    import wrapt as _wrapt

    _wrapt.register_post_import_hook(
        lambda _: _importlib.import_module("manifold_tying.huggingface.native").register(),
        "transformers.modeling_utils",
    )


if not _typing.TYPE_CHECKING:  # which would take any misspelt name for Any

    def __getattr__(name: str) -> _typing.Any:
        if name in _PACKAGES:
            return _importlib.import_module(f"manifold_tying.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'manifold_tying' has no attribute {name!r}")
        homes = (_importlib.import_module(f"manifold_tying.{home}") for home in _HOMES)
        globals()[name] = found = next(getattr(home, name) for home in homes if hasattr(home, name))
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
