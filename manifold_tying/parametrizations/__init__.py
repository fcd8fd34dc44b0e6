"""Constraints on the weights of any layer, registered through torch.nn.utils.parametrize."""

from manifold_tying.parametrizations._cholesky import CholeskyFactor, CholeskySPD, Diagonal
from manifold_tying.parametrizations._constraint import Constraint, dtype_after
from manifold_tying.parametrizations._doubly_stochastic import doubly_stochastic
from manifold_tying.parametrizations._layer_class import is_ours, own_class, parametrized
from manifold_tying.parametrizations._layout import CONVOLUTIONS, Layout, shared_parameters
from manifold_tying.parametrizations._low_rank import LowRank, isospectral, low_rank
from manifold_tying.parametrizations._on_manifold import OnManifold, constrain, sphere, stiefel
from manifold_tying.parametrizations._orthonormal import CayleyFactor, OrthogonalMap, OrthonormalFactor
from manifold_tying.parametrizations._points import home_of, homes, is_removed, manifold_of, manifolds_in
from manifold_tying.parametrizations._project import points, project, warn_if_off
from manifold_tying.parametrizations._register import constraints, materialize, orthogonal, register, spd

__all__ = [
    "CONVOLUTIONS", "CayleyFactor", "CholeskyFactor", "CholeskySPD", "Constraint", "Diagonal", "Layout", "LowRank",
    "OnManifold", "OrthogonalMap", "OrthonormalFactor", "constrain", "constraints", "doubly_stochastic",
    "dtype_after", "home_of", "homes", "is_ours", "is_removed", "isospectral", "low_rank", "manifold_of",
    "manifolds_in", "materialize", "orthogonal", "own_class", "parametrized", "points", "project", "register",
    "shared_parameters", "spd", "sphere", "stiefel", "warn_if_off"
]  # fmt: skip
