"""Manifolds with geoopt's interface."""

from manifold_tying.manifolds._spd import SPD as SPD
from manifold_tying.manifolds._spd import nearest_spd as nearest_spd
from manifold_tying.manifolds._sphere import Of as Of
from manifold_tying.manifolds._sphere import Sphere as Sphere
from manifold_tying.manifolds._sphere import Spheres as Spheres
from manifold_tying.manifolds._sphere import norms as norms
from manifold_tying.manifolds._stiefel import Retraction as Retraction
from manifold_tying.manifolds._stiefel import Stiefel as Stiefel
from manifold_tying.manifolds._stiefel import check_retraction as check_retraction
from manifold_tying.manifolds._stiefel import scaled_tangent_part as scaled_tangent_part
from manifold_tying.manifolds._stiefel import tangent_part as tangent_part
