"""Constraints on the weights of any layer, registered through torch.nn.utils.parametrize."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from manifold_tying.parametrizations._cholesky import Bounds as Bounds
from manifold_tying.parametrizations._cholesky import CholeskyFactor as CholeskyFactor
from manifold_tying.parametrizations._cholesky import CholeskySPD as CholeskySPD
from manifold_tying.parametrizations._cholesky import Diagonal as Diagonal
from manifold_tying.parametrizations._constraint import Constraint as Constraint
from manifold_tying.parametrizations._constraint import dtype_after as dtype_after
from manifold_tying.parametrizations._layout import CONVOLUTIONS as CONVOLUTIONS
from manifold_tying.parametrizations._layout import Layout as Layout
from manifold_tying.parametrizations._layout import shared_parameters as shared_parameters
from manifold_tying.parametrizations._orthonormal import CayleyFactor as CayleyFactor
from manifold_tying.parametrizations._orthonormal import OnStiefel as OnStiefel
from manifold_tying.parametrizations._orthonormal import OrthogonalMap as OrthogonalMap
from manifold_tying.parametrizations._orthonormal import OrthonormalFactor as OrthonormalFactor
from manifold_tying.parametrizations._points import manifold_of as manifold_of
from manifold_tying.parametrizations._points import mark as mark
from manifold_tying.parametrizations._points import stamp_of as stamp_of
from manifold_tying.parametrizations._project import points as points
from manifold_tying.parametrizations._project import project as project
from manifold_tying.parametrizations._project import warn_if_off as warn_if_off
from manifold_tying.parametrizations._register import constraints as constraints
from manifold_tying.parametrizations._register import is_ours as is_ours
from manifold_tying.parametrizations._register import materialize as materialize
from manifold_tying.parametrizations._register import orthogonal as orthogonal
from manifold_tying.parametrizations._register import own_class as own_class
from manifold_tying.parametrizations._register import parametrized as parametrized
from manifold_tying.parametrizations._register import register as register
from manifold_tying.parametrizations._register import spd as spd
from manifold_tying.parametrizations._register import stiefel as stiefel

if _TYPE_CHECKING:
    from manifold_tying.poet import Equivalence as Equivalence
    from manifold_tying.poet import Init as Init
    from manifold_tying.poet import Scheme as Scheme
    from manifold_tying.poet import equivalence as equivalence
    from manifold_tying.poet import equivalence_ as equivalence_
    from manifold_tying.poet import equivalences as equivalences
    from manifold_tying.poet import keep_plain_weights as keep_plain_weights
    from manifold_tying.poet import load_adapter as load_adapter
    from manifold_tying.poet import merge as merge
    from manifold_tying.poet import save_adapter as save_adapter

_OF_POET = (
    *("Equivalence", "Init", "Scheme", "equivalence", "equivalence_", "equivalences"),
    *("keep_plain_weights", "load_adapter", "merge", "save_adapter"),
)
__all__ = [*(name for name in globals() if not name.startswith("_")), *_OF_POET]


def __getattr__(name: str) -> _Any:
    if name not in _OF_POET:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Lazy import: poet itself imports this package.
    found = getattr(_importlib.import_module("manifold_tying.poet"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
