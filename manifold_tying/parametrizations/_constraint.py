"""Base class of all constraints, and the parametrization list that keeps the stored tensor in float32."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying.parametrizations._points import mark


class Constraint(nn.Module, ABC):
    """A parametrization that maps the stored tensor to the weight; ``right_inverse`` projects a weight before storing it.

    The stored tensor stays at least float32 (:class:`Float32ParametrizationList`); the weight has the layer's dtype.
    """

    dtype_marker: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # Empty tensor that tracks the layer's dtype; the stored tensor stays float32.
        self.register_buffer("dtype_marker", torch.empty(0, dtype=dtype), persistent=False)

    def layer_dtype_tensors(self) -> list[Tensor]:
        """The tensors that keep the layer's dtype and are cast by .half() and .bfloat16()."""
        return [self.dtype_marker]

    @staticmethod
    def warn_on_drift(found: Sequence[tuple[str, Any, Tensor]]) -> None:
        """Warn about the worst of (full name, constraint, stored tensor) whose map has left the manifold."""

    @abstractmethod
    def forward(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> Tensor: ...


class Float32ParametrizationList(parametrize.ParametrizationList):
    """Parametrization list whose stored tensor stays float32 under .half() and .bfloat16(); only the weight's dtype changes."""

    label: str
    """Class of the layer, name and shape of the parameter: identifies it in messages when the full name is unknown."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        layer_dtype = [t for part in self.modules() if isinstance(part, Constraint) for t in part.layer_dtype_tensors()]

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if (
                any(tensor is other for other in layer_dtype)
                or not moved.is_floating_point()
                or moved.dtype.itemsize >= 4
            ):
                return moved
            return tensor.to(moved.device, torch.float32)

        super()._apply(wide, recurse)
        mark_point(self)
        return self

    def right_inverse(self, value: Tensor) -> None:
        """Assign a weight, cast from any floating dtype."""
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(self.original.dtype)
        super().right_inverse(value)

    # The manifold is an attribute of the tensor: copying, loading and sharding replace the tensor and lose it.

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        mark_point(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "original":
            mark_point(self)


def mark_point(parts: parametrize.ParametrizationList) -> None:
    """Tag the stored tensor with its manifold, which ``RiemannianAdam(model.parameters())`` reads.

    The stored tensor is not a ``geoopt.ManifoldParameter``, the only class that geoopt's optimizers recognize: FSDP2 and
    ``.to_empty()`` replace it by a plain parameter, and torch.load rejects it with ``weights_only=True``.
    """
    manifold = getattr(parts[0], "manifold", None)
    if manifold is not None:
        mark(parts, manifold)
