"""Symmetric positive definite weights through a Cholesky factor with positive diagonal."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed, precision
from manifold_tying.manifolds import nearest_spd
from manifold_tying.parametrizations._constraint import Constraint

Diagonal = Literal["softplus", "exp"]
Bounds = tuple[float, float]


class _Clamp(torch.autograd.Function):
    """Clamp whose gradient vanishes only where a descent step would move further outside, so no entry gets stuck there.

    Under torch.func transforms it is an ordinary clamp: the gradient vanishes wherever an entry is outside.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = (low, high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        low, high = ctx.bounds
        outward = ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))
        result = grad.masked_fill(outward, 0)
        if torch.is_grad_enabled() and (((x < low) | (x > high)) & ~outward).any():
            # This gradient is not the derivative of the clamp, so it cannot be differentiated.
            result = autograd.no_second_derivative(
                result, (x, grad), "an entry of the diagonal is outside of its bounds"
            )
        return result, None, None


_clamp = autograd.custom_gradient(_Clamp, torch.clamp, differentiable=True)


class CholeskyFactor(Constraint):
    """Maps a free square tensor to a lower triangular L: keeps the strict lower triangle and maps the diagonal to (0, ∞).

    Args:
        diagonal: "softplus", log(1 + eˣ), or "exp".
        bounds: (low, high), 0 < low < high: clamps the diagonal of L. (PIT, section 4.2 and appendix A.2.)
    """

    def __init__(
        self, diagonal: Diagonal = "softplus", bounds: Bounds | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(dtype)
        if diagonal not in get_args(Diagonal):
            raise ValueError(f"unknown diagonal {diagonal!r}; choose one of {', '.join(get_args(Diagonal))}")
        if bounds is not None and not (len(bounds) == 2 and 0 < bounds[0] < bounds[1]):
            raise ValueError(f"expected bounds=(low, high) with 0 < low < high, got {bounds}")
        self.diagonal = diagonal
        self.bounds = None if bounds is None else (float(bounds[0]), float(bounds[1]))

    def describe(self) -> str:
        return f"cholesky_factor(diagonal={self.diagonal!r}, bounds={self.bounds})"

    def forward(self, stored: Tensor) -> Tensor:
        return self.lower(stored).to(self.dtype)

    def lower(self, stored: Tensor) -> Tensor:
        """L in the stored tensor's dtype; a DTensor is gathered, so every rank gets the full L."""
        stored = distributed.full_tensor(stored)
        raw = stored.diagonal(dim1=-2, dim2=-1)
        positive = F.softplus(raw) if self.diagonal == "softplus" else raw.exp()
        if self.bounds is not None:
            positive = _clamp(positive, *self.bounds)
        return stored.tril(-1) + torch.diag_embed(positive)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Invert :meth:`lower`; ValueError unless weight is lower triangular with a positive diagonal."""
        if not autograd.has_data(weight):
            return torch.empty_like(weight)
        positive = weight.diagonal(dim1=-2, dim2=-1)
        square = weight.shape[-1] == weight.shape[-2]
        if not square or weight.triu(1).any() or not (positive > 0).all():
            raise ValueError(f"expected a lower triangular matrix with diagonal > 0, got one of {tuple(weight.shape)}")
        if self.bounds is not None:
            positive = positive.clamp(*self.bounds)
        # log(eʸ - 1) without overflow
        raw = positive + torch.log(-torch.expm1(-positive)) if self.diagonal == "softplus" else positive.log()
        return weight.tril(-1) + torch.diag_embed(raw)

    def extra_repr(self) -> str:
        return f"diagonal={self.diagonal!r}" + (f", bounds={self.bounds}" if self.bounds else "")


class CholeskySPD(CholeskyFactor):
    """T = L Lᵀ with L from :class:`CholeskyFactor`; assigning T projects it to the nearest positive definite matrix."""

    def describe(self) -> str:
        return f"spd(diagonal={self.diagonal!r}, bounds={self.bounds})"

    def forward(self, stored: Tensor) -> Tensor:
        with precision.full_precision(stored.device):
            L = self.lower(stored)
            return (L @ L.mT).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        T = nearest_spd(weight.to(precision.compute_dtype(weight.dtype)))
        return super().right_inverse(torch.linalg.cholesky(T).contiguous())
