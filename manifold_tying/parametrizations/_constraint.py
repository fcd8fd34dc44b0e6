"""What every constraint of ours is, and how its stored tensor stays float32 and knows its manifold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying.parametrizations._points import mark


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

    @staticmethod
    def watch_all(found: Sequence[tuple[str, Any, Tensor]]) -> None:
        """Warn of the worst of (full name, constraint, stored tensor) where its map has left the manifold."""

    @abstractmethod
    def forward(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> Tensor: ...


class WideStorage(parametrize.ParametrizationList):
    """The list that holds the stored tensor: .half() and .bfloat16() reach the weight's dtype and leave the stored float32."""

    label: str
    """The layer's class, the parameter's name and shape, for messages that know no full name."""

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
    """Note a point's manifold on the tensor itself, where ``RiemannianAdam(model.parameters())`` looks for it.

    geoopt's optimizers look at ``geoopt.ManifoldParameter`` only. The stored tensor is none: FSDP2 and ``.to_empty()`` replace
    it by a plain parameter, and torch.load does not read one with ``weights_only=True``.
    """
    manifold = getattr(parts[0], "manifold", None)
    if manifold is not None:
        mark(parts, manifold)
