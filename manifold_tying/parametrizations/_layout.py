"""How a weight of any shape is seen as tall matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manifold_tying import linalg

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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
            raise ValueError(
                f"{kind}.{name} is constrained already; call materialize(module) first, or remove_parametrizations of "
                "torch.nn.utils.parametrize where the constraint is not ours"
            )
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{kind} renormalizes rows of its weight in place (max_norm={module.max_norm}), which no constraint survives; "
                "set max_norm to None"
            )
        weight = module._parameters.get(name)
        if weight is None:
            names = ", ".join(n for n, p in module._parameters.items() if p is not None) or "none"
            raise ValueError(f"{kind} has no parameter {name!r} of its own; its parameters: {names}")
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise ValueError(f"{kind}.{name} has no shape yet; run the module on some input first")
        if linalg.is_distributed(weight):
            raise ValueError(
                f"{kind}.{name} is distributed over processes already; constrain it first, then shard the model"
            )
        linalg.working_dtype(weight.dtype)
        if weight.ndim < 2 or 0 in weight.shape:
            raise ValueError(f"expected {kind}.{name} to be a matrix or a stack of matrices, got {tuple(weight.shape)}")
        if linalg.has_values(weight) and not torch.isfinite(weight).all():
            raise ValueError(f"expected {kind}.{name} to be finite, got NaN or Inf in it")
        return cls(weight.shape, isinstance(module, CONVOLUTIONS))

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(..., m, n) of the weight as it lies, wide or tall."""
        return (self.shape[0], self.shape[1:].numel()) if self.flatten else tuple(self.shape)

    @property
    def _wide(self) -> bool:
        return self.matrix_shape[-2] < self.matrix_shape[-1]

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
