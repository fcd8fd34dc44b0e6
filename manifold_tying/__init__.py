"""Manifold-constrained parametrizations, Riemannian optimizers and Pseudo-Inverse Tying for PyTorch.

Docstrings cite two papers:

- PIT: "Rethinking Weight Tying: Pseudo-Inverse Tying for LM Stable Training and Updates", arXiv:2602.04556;
- POET: Qiu et al., "Reparameterized LLM Training via Orthogonal Equivalence Transformation", 2025, arXiv:2506.08001.
"""

import contextlib as _contextlib
import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from manifold_tying import diagnostics as diagnostics
    from manifold_tying import huggingface as huggingface
    from manifold_tying import linalg as linalg
    from manifold_tying import models as models
    from manifold_tying import optim as optim
    from manifold_tying import poet as poet
    from manifold_tying.huggingface import conversion_losses as conversion_losses
    from manifold_tying.huggingface import convert as convert
    from manifold_tying.huggingface import export as export
    from manifold_tying.huggingface import load as load
    from manifold_tying.huggingface import save as save
    from manifold_tying.manifolds import SPD as SPD
    from manifold_tying.manifolds import Sphere as Sphere
    from manifold_tying.manifolds import Stiefel as Stiefel
    from manifold_tying.parametrizations import constrain as constrain
    from manifold_tying.parametrizations import doubly_stochastic as doubly_stochastic
    from manifold_tying.parametrizations import isospectral as isospectral
    from manifold_tying.parametrizations import low_rank as low_rank
    from manifold_tying.parametrizations import materialize as materialize
    from manifold_tying.parametrizations import orthogonal as orthogonal
    from manifold_tying.parametrizations import project as project
    from manifold_tying.parametrizations import spd as spd
    from manifold_tying.parametrizations import sphere as sphere
    from manifold_tying.parametrizations import stiefel as stiefel
    from manifold_tying.poet import equivalence as equivalence
    from manifold_tying.poet import equivalence_ as equivalence_
    from manifold_tying.poet import merge as merge
    from manifold_tying.recipe import pit_groups as pit_groups
    from manifold_tying.recipe import pit_schedule as pit_schedule
    from manifold_tying.tying import PIT as PIT
    from manifold_tying.tying import TokenInterface as TokenInterface
    from manifold_tying.tying import TransposeTying as TransposeTying
    from manifold_tying.tying import Untied as Untied

__version__ = "0.1.0"

# Import public names on first use: geoopt takes half as long to import as torch.
_PACKAGES = (
    "diagnostics",
    "huggingface",
    "linalg",
    "manifolds",
    "models",
    "optim",
    "parametrizations",
    "poet",
    "tying",
)
_HOMES = {
    **dict.fromkeys(("SPD", "Sphere", "Stiefel"), "manifolds"),
    **dict.fromkeys(("constrain", "isospectral", "low_rank", "materialize", "orthogonal"), "parametrizations"),
    **dict.fromkeys(("doubly_stochastic", "project", "spd", "sphere", "stiefel"), "parametrizations"),
    **dict.fromkeys(("equivalence", "equivalence_", "merge"), "poet"),
    **dict.fromkeys(("pit_groups", "pit_schedule"), "recipe"),
    **dict.fromkeys(("PIT", "TokenInterface", "TransposeTying", "Untied"), "tying"),
    **dict.fromkeys(("conversion_losses", "convert", "export", "load", "save"), "huggingface"),
}
__all__ = [*_PACKAGES, *_HOMES]

# Let transformers build converted models, once it is imported; importing it here would take seconds.
with _contextlib.suppress(ModuleNotFoundError):  # wrapt comes with the extra `huggingface`
    import wrapt as _wrapt

    _wrapt.register_post_import_hook(
        lambda _: _importlib.import_module("manifold_tying.huggingface.native").register(),
        "transformers.modeling_utils",
    )


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"manifold_tying.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'manifold_tying' has no attribute {name!r}")
    found = getattr(_importlib.import_module(f"manifold_tying.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
