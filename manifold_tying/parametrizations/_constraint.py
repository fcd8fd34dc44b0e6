"""Base class of all constraints, and the parametrization list that keeps the stored tensor in float32."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import distributed, precision
from manifold_tying.parametrizations._points import mark


class Constraint(nn.Module, ABC):
    """A parametrization that maps the stored tensor to the weight; ``right_inverse`` projects a weight before storing it.

    The stored tensor stays at least float32 (:class:`Float32ParametrizationList`); the weight has the layer's dtype.
    """

    dtype: torch.dtype
    """The layer's dtype, which the weight has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def layer_dtype_tensors(self) -> list[Tensor]:
        """The tensors that have the layer's dtype, so that .half() and .bfloat16() cast them."""
        return []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = dtype_after(fn, self.dtype)
        return super()._apply(fn, recurse)

    @staticmethod
    def warn_on_drift(found: Sequence[tuple[str, Any, Tensor]]) -> None:
        """Warn about the worst of (full name, constraint, stored tensor) whose map has left the manifold."""

    @abstractmethod
    def forward(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> Tensor: ...


def dtype_after(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """What a cast or move of ``nn.Module._apply`` makes of a dtype."""
    return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype


class Float32ParametrizationList(parametrize.ParametrizationList):
    """Parametrization list whose stored tensor stays float32 under .half() and .bfloat16(); only the weight's dtype changes."""

    label: str
    """Class of the layer, name and shape of the parameter: identifies it in messages when the full name is unknown."""
    weight_shape: torch.Size
    """Shape of the parameter, which that of the stored tensor may differ from."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        found = [part for part in self.modules() if isinstance(part, Constraint)]
        layer_dtype = [tensor for part in found for tensor in part.layer_dtype_tensors()]
        dtypes = [dtype_after(fn, part.dtype) for part in found]

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and not tensor.is_floating_point():
                return tensor.to(moved.device)  # .type() casts indices, too
            if any(tensor is other for other in layer_dtype) or moved.dtype.itemsize >= 4:
                return moved
            return tensor.to(moved.device, torch.float32)

        super()._apply(wide, recurse)
        for part, dtype in zip(found, dtypes, strict=True):
            part.dtype = dtype
        mark_point(self)
        return self

    def right_inverse(self, value: Tensor) -> None:
        """Assign a weight, cast from any floating dtype; if the stored tensor is sharded, every rank has the same weight."""
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(self.original.dtype)
        if not distributed.is_dtensor(self.original):
            super().right_inverse(value)
            mark_point(self)
            return
        with torch.no_grad():
            for part in reversed(cast(list[Constraint], list(self))):
                value = part.right_inverse(value)
            distributed.to_local(self.original).copy_(distributed.shard_like(value, self.original))

    # The manifold is an attribute of the tensor: copying, loading and sharding replace the tensor and lose it.

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        mark_point(self)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.original.dtype != precision.compute_dtype(cast(Constraint, self[0]).dtype):
            self.to(self.original.dtype)  # assign=True replaced the stored tensor by one of another dtype
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
