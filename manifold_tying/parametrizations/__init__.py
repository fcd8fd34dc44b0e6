"""Constraints on the weights of any layer, registered through torch.nn.utils.parametrize."""

from manifold_tying.parametrizations._adapter import load_adapter as load_adapter
from manifold_tying.parametrizations._adapter import save_adapter as save_adapter
from manifold_tying.parametrizations._cholesky import Bounds as Bounds
from manifold_tying.parametrizations._cholesky import CholeskyFactor as CholeskyFactor
from manifold_tying.parametrizations._cholesky import CholeskySPD as CholeskySPD
from manifold_tying.parametrizations._cholesky import Diagonal as Diagonal
from manifold_tying.parametrizations._constraint import mark_point as mark_point
from manifold_tying.parametrizations._equivalence import Equivalence as Equivalence
from manifold_tying.parametrizations._equivalence import equivalences as equivalences
from manifold_tying.parametrizations._equivalence_layer import equivalence as equivalence
from manifold_tying.parametrizations._equivalence_model import equivalence_ as equivalence_
from manifold_tying.parametrizations._merge import merge as merge
from manifold_tying.parametrizations._orthonormal import CayleyFactor as CayleyFactor
from manifold_tying.parametrizations._orthonormal import OnStiefel as OnStiefel
from manifold_tying.parametrizations._orthonormal import OrthogonalMap as OrthogonalMap
from manifold_tying.parametrizations._orthonormal import OrthonormalFactor as OrthonormalFactor
from manifold_tying.parametrizations._plain_weights import keep_plain_weights as keep_plain_weights
from manifold_tying.parametrizations._points import manifold_of as manifold_of
from manifold_tying.parametrizations._register import constraints as constraints
from manifold_tying.parametrizations._register import materialize as materialize
from manifold_tying.parametrizations._register import orthogonal as orthogonal
from manifold_tying.parametrizations._register import parametrized as parametrized
from manifold_tying.parametrizations._register import spd as spd
from manifold_tying.parametrizations._register import stiefel as stiefel
from manifold_tying.poet.spec import Init as Init
from manifold_tying.poet.spec import Scheme as Scheme
