"""Manifolds with geoopt's interface."""

from manifold_tying.manifolds._spd import SPD, nearest_spd
from manifold_tying.manifolds._sphere import Of, Sphere, Spheres, norms
from manifold_tying.manifolds._stiefel import Retraction, Stiefel, scaled_tangent_part, tangent_part

__all__ = [
    "SPD", "Of", "Retraction", "Sphere", "Spheres", "Stiefel", "nearest_spd", "norms", "scaled_tangent_part", "tangent_part"
]  # fmt: skip
