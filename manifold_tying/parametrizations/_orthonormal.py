"""Orthonormal weights as images of free tensors."""

from typing import Literal

import torch
from torch import Tensor

from manifold_tying import autograd, linalg
from manifold_tying.manifolds import Stiefel
from manifold_tying.parametrizations._constraint import Constraint
from manifold_tying.parametrizations._layout import Layout

OrthogonalMap = Literal["polar", "qr", "cayley", "cayley-neumann"]


class OrthonormalFactor(Constraint):
    """The weight is the polar or QR factor of the stored tensor Y (..., n, p); assigning stores the nearest such matrix."""

    call = "orthogonal"

    def __init__(self, layout: Layout, dtype: torch.dtype, map: OrthogonalMap, special: bool) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.map = map
        self.special = special

    def forward(self, stored: Tensor) -> Tensor:
        X = linalg.orthonormalize(stored, "polar" if self.map == "polar" else "qr")
        if self.special:  # the stored tensor may have crossed to the other component
            last = torch.linalg.slogdet(X.detach()).sign[..., None, None]  # det underflows
            X = torch.cat([X[..., :-1], X[..., -1:] * last], dim=-1)
        return self.layout.to_weight(X).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return nearest(self.layout.to_matrix(weight), self.special)

    def extra_repr(self) -> str:
        return f"map={self.map!r}{', special=True' if self.special else ''}"


class _Rotations(Stiefel):
    """Square matrices with orthonormal columns and determinant 1."""

    def projx(self, x: Tensor) -> Tensor:
        return nearest(x, special=True)


class CayleyFactor(OrthonormalFactor):
    """The weight is the Cayley transform of a skew matrix, applied to a base point; assigning moves the base and stores 0.

    Square: X = B (I - A)⁻¹(I + A), A = tril(Y) - tril(Y)ᵀ. Tall: the Cayley curve through B along the tangent part of Y,
    computed with p x p matrices. ``terms`` replaces the inverse by that many terms of its Neumann series. The truncated
    series leaves the manifold as A grows, so the result is projected by its polar factor.
    """

    base: Tensor

    def __init__(self, layout: Layout, dtype: torch.dtype, base: Tensor, terms: int | None, special: bool) -> None:
        super().__init__(layout, dtype, "cayley" if terms is None else "cayley-neumann", special)
        self.terms = terms
        self.bases = _Rotations() if special else Stiefel()
        self.register_buffer("base", base)

    def forward(self, stored: Tensor) -> Tensor:
        X = linalg.cayley_at(self.base, stored, self.terms)
        if self.terms is not None:
            X = linalg.polar(X)[0]
        return self.layout.to_weight(X).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        base = nearest(self.layout.to_matrix(weight), self.special)
        self.base.copy_(base)
        return base.new_zeros(base.shape)


def nearest(Y: Tensor, special: bool) -> Tensor:
    """The nearest matrix with orthonormal columns; if ``special``, the nearest rotation (Kabsch), whose determinant is 1."""
    U, H = linalg.polar(Y)
    if not special or not autograd.has_data(U):
        return U
    least = torch.linalg.eigh(H.double()).eigenvectors[..., :1]
    reflected = U - (2 * U.double() @ least @ least.mT).to(U.dtype)
    return torch.where((torch.linalg.slogdet(U).sign < 0)[..., None, None], reflected, U)
