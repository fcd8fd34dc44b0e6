"""Constraints on the weights of any layer, registered through torch.nn.utils.parametrize."""

from manifold_tying.parametrizations._cholesky import Bounds as Bounds
from manifold_tying.parametrizations._cholesky import CholeskyFactor as CholeskyFactor
from manifold_tying.parametrizations._cholesky import Diagonal as Diagonal
from manifold_tying.parametrizations._orthonormal import OrthogonalMap as OrthogonalMap
from manifold_tying.parametrizations._register import constraints as constraints
from manifold_tying.parametrizations._register import materialize as materialize
from manifold_tying.parametrizations._register import orthogonal as orthogonal
from manifold_tying.parametrizations._register import spd as spd
from manifold_tying.parametrizations._register import stiefel as stiefel
