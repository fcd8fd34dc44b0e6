"""Orthonormal weights: as points that a Riemannian optimizer moves, and as images of free tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import linalg
from manifold_tying.manifolds import Stiefel
from manifold_tying.parametrizations._layout import Layout

OrthogonalMap = Literal["polar", "qr", "cayley", "cayley-neumann"]


class Constraint(nn.Module, ABC):
    """A parametrization of ours: maps the stored tensor to the weight; ``right_inverse`` projects a weight to be stored.

    The stored tensor is at least float32 and stays so (:class:`WideStorage`), the weight comes out in the layer's dtype.
    """

    like: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # Empty; there to follow the layer through .to(dtype), as the stored tensor cannot when it is the wider one.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def following(self) -> list[Tensor]:
        """The tensors that have the layer's dtype and follow it through .half() and .bfloat16()."""
        return [self.like]

    @abstractmethod
    def forward(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> Tensor: ...


class WideStorage(parametrize.ParametrizationList):
    """The list that holds the stored tensor: .half() and .bfloat16() reach the weight's dtype and leave the stored float32."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        following = [t for part in self.modules() if isinstance(part, Constraint) for t in part.following()]

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if (
                any(tensor is other for other in following)
                or not moved.is_floating_point()
                or moved.dtype.itemsize >= 4
            ):
                return moved
            return tensor.to(moved.device, torch.float32)

        super()._apply(wide, recurse)
        mark_point(self)
        return self

    def right_inverse(self, value: Tensor) -> None:
        """Assign a weight: one in another floating dtype as one in the layer's."""
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(self.original.dtype)
        super().right_inverse(value)

    # A copied tensor has forgotten its manifold, and one that takes its place, loaded or sharded, has none.

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        mark_point(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "original":
            mark_point(self)


def mark_point(parts: parametrize.ParametrizationList) -> None:
    """Note a point's manifold on the tensor itself, where geoopt and ``RiemannianAdam(model.parameters())`` look for it."""
    if isinstance(parts[0], OnStiefel):
        setattr(parts.original, "manifold", parts[0].manifold)  # noqa: B010 - a tensor declares no such attribute


class OnStiefel(Constraint):
    """The stored tensor is the point, tall (..., n, p); the weight is the same numbers in the layer's own shape."""

    def __init__(self, layout: Layout, dtype: torch.dtype, manifold: Stiefel) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.manifold = manifold

    def forward(self, stored: Tensor) -> Tensor:
        return self.layout.to_weight(stored).to(self.like.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        matrix = self.layout.to_matrix(weight)
        return (
            matrix if matrix.is_meta else self.manifold.projx(matrix)
        )  # there is nothing to project before it is loaded


class OrthonormalFactor(Constraint):
    """The weight is the polar or the QR factor of the stored tensor Y (..., n, p); assigning stores the nearest such matrix."""

    def __init__(self, layout: Layout, dtype: torch.dtype, map: Literal["polar", "qr"]) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.map = map

    def forward(self, stored: Tensor) -> Tensor:
        # Cholesky-QR gives the same factor as Householder QR, by products, and falls back to it.
        X = linalg.orthonormalize(stored, "polar" if self.map == "polar" else "cholesky-qr")
        return self.layout.to_weight(X).to(self.like.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return linalg.polar(self.layout.to_matrix(weight))[0]

    def extra_repr(self) -> str:
        return f"map={self.map!r}"


class CayleyFactor(Constraint):
    """The weight is the Cayley transform of a skew matrix, applied to a base point; assigning moves the base and stores 0.

    Square: X = B (I - A)⁻¹(I + A), A = tril(Y) - tril(Y)ᵀ. Tall: the Cayley curve through B along the tangent part of Y, by
    2p x 2p matrices. ``terms`` replaces the inverse by that many terms of its Neumann series, whose defect is about
    ‖A‖^(2 terms + 2) for an even number: fine while A is small, and ``module.weight = module.weight`` makes it small again.
    """

    base: Tensor

    def __init__(self, layout: Layout, dtype: torch.dtype, base: Tensor, terms: int | None) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.terms = terms
        self.register_buffer("base", base)

    def forward(self, stored: Tensor) -> Tensor:
        X = linalg.cayley_at(self.base, stored, self.terms)
        return self.layout.to_weight(X).to(self.like.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        base = linalg.polar(self.layout.to_matrix(weight))[0]
        self.base.copy_(base)
        return base.new_zeros(base.shape)

    def extra_repr(self) -> str:
        return "cayley" if self.terms is None else f"cayley-neumann, terms={self.terms}"
