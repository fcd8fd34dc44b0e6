"""The polar factors, differentiable three times, in either mode and under torch.func."""

from collections.abc import Callable

import torch
from torch import Tensor

from manifold_tying.precision import full_precision, sym


def differentiable_polar(
    Y: Tensor, factors: Callable[[Tensor], tuple[Tensor, Tensor]], derivatives: int = 3
) -> tuple[Tensor, Tensor]:
    """U and H of Y = U H as ``factors`` computes them.

    Newton steps for U H = Y and UᵀU = I, whose Jacobian is a constant, leave the values as they are; each makes one more
    derivative right. The Jacobian divides by h_i + h_j only: equal singular values are harmless.
    """
    with full_precision(Y.device):
        U0, H0 = U, H = factors(Y.detach())
        h, V = torch.linalg.eigh(H0.double())
        h = torch.maximum(h, h[..., -1:] * 1e-14)
        sums = h[..., :, None] + h[..., None, :]
        inverse = ((V / h[..., None, :]) @ V.mT).to(U0.dtype)
        for _ in range(derivatives):
            off, bent = _change(Y - U @ H), _change(U.mT @ U) / -2
            M = U0.mT @ off
            A = M - bent @ H0
            Omega = (V @ ((V.mT @ (A - A.mT).double() @ V) / sums) @ V.mT).to(A.dtype)
            U = U + U0 @ (Omega + bent) + (off - U0 @ M) @ inverse
            H = H + sym(A - Omega @ H0)
        return U, H


def _change(A: Tensor) -> Tensor:
    """0 with the derivatives of A."""
    return A - A.detach()
