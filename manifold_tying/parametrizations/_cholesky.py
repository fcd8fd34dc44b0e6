"""Symmetric positive definite weights through a Cholesky factor with positive diagonal."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manifold_tying import autograd, distributed, precision
from manifold_tying.manifolds import nearest_spd
from manifold_tying.parametrizations._constraint import Constraint

Diagonal = Literal["softplus", "exp"]


class CholeskyFactor(Constraint):
    """Maps a free square tensor to a lower triangular L: keeps the strict lower triangle and maps the diagonal to (0, ∞).

    Args:
        diagonal: "softplus", log(1 + eˣ), or "exp".
    """

    call = "cholesky_factor"

    def __init__(self, diagonal: Diagonal = "softplus", dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        precision.check_choice("diagonal", diagonal, Diagonal)
        self.diagonal = diagonal

    def forward(self, stored: Tensor) -> Tensor:
        return self.lower(stored).to(self.dtype)

    def lower(self, stored: Tensor) -> Tensor:
        """L in the stored tensor's dtype; a DTensor is gathered, so every rank gets the full L."""
        stored = distributed.full_tensor(stored)
        raw = stored.diagonal(dim1=-2, dim2=-1)
        positive = F.softplus(raw) if self.diagonal == "softplus" else raw.exp()
        return stored.tril(-1) + torch.diag_embed(positive)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Invert :meth:`lower`; ValueError unless weight is lower triangular with a positive diagonal."""
        if not autograd.has_data(weight):
            return torch.empty_like(weight)
        positive = weight.diagonal(dim1=-2, dim2=-1)
        square = weight.shape[-1] == weight.shape[-2]
        if not square or weight.triu(1).any() or not (positive > 0).all():
            raise ValueError(f"expected a lower triangular matrix with diagonal > 0, got one of {tuple(weight.shape)}")
        # log(eʸ - 1) without overflow
        raw = positive + torch.log(-torch.expm1(-positive)) if self.diagonal == "softplus" else positive.log()
        return weight.tril(-1) + torch.diag_embed(raw)

    def extra_repr(self) -> str:
        return f"diagonal={self.diagonal!r}"


class CholeskySPD(CholeskyFactor):
    """T = L Lᵀ with L from :class:`CholeskyFactor`; assigning T projects it to the nearest positive definite matrix."""

    call = "spd"

    def forward(self, stored: Tensor) -> Tensor:
        with precision.full_precision(stored.device):
            L = self.lower(stored)
            return (L @ L.mT).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        T = nearest_spd(weight.to(precision.compute_dtype(weight.dtype)))
        return super().right_inverse(torch.linalg.cholesky(T).contiguous())
