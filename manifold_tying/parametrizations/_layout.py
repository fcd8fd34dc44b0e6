"""How a weight of any shape is seen as tall matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manifold_tying import linalg

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """A weight as matrices (..., n, p) with n >= p: kernels flattened from their second dimension on, wide ones transposed.

    The last two dimensions of any other weight are the matrix, the ones before are batch dimensions.
    """

    shape: torch.Size
    flatten: bool

    @classmethod
    def of(cls, module: nn.Module, name: str) -> "Layout":
        """The layout of ``module.name``; ValueError where it is no parameter that can be constrained."""
        kind = type(module).__name__
        if name in getattr(module, "parametrizations", {}):
            raise ValueError(f"{kind}.{name} is constrained already; call materialize(module) first")
        weight = module._parameters.get(name)
        if weight is None:
            names = ", ".join(n for n, p in module._parameters.items() if p is not None) or "none"
            raise ValueError(f"{kind} has no parameter {name!r} of its own; its parameters: {names}")
        linalg.working_dtype(weight.dtype)
        if weight.ndim < 2 or 0 in weight.shape:
            raise ValueError(f"expected {kind}.{name} to be a matrix or a stack of matrices, got {tuple(weight.shape)}")
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise ValueError(f"expected {kind}.{name} to be finite, got NaN or Inf in it")
        return cls(weight.shape, isinstance(module, _CONVOLUTIONS))

    @property
    def _wide(self) -> bool:
        rows = self.shape[0] if self.flatten else self.shape[-2]
        columns = self.shape[1:].numel() if self.flatten else self.shape[-1]
        return rows < columns

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Weight to tall matrices, contiguous, at least float32."""
        if weight.shape != self.shape:
            raise ValueError(f"expected a weight of shape {tuple(self.shape)}, got {tuple(weight.shape)}")
        matrix = weight.flatten(1) if self.flatten else weight
        return (matrix.mT if self._wide else matrix).to(linalg.working_dtype(weight.dtype)).contiguous()

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Tall matrices to the weight."""
        if matrix.shape == self.shape and not self._wide:
            return matrix  # not a view: gradients of one are not summed in place
        return (matrix.mT if self._wide else matrix).reshape(self.shape)
