"""The logarithm of symmetric positive definite matrices, differentiable also at repeated eigenvalues."""

import torch
from torch import Tensor

from manifold_tying.autograd import is_tracing
from manifold_tying.precision import full_precision

_DERIVATIVES = 3


def spd_log(W: Tensor) -> Tensor:
    """log W of symmetric positive definite W (..., d, d), symmetric. Three times differentiable, for all eigenvalues.

    The gradient of an eigendecomposition divides by differences of eigenvalues. Here X solves exp X = W by Newton steps whose
    Jacobian, that of exp at log W, is a constant: they leave X as it is, and each makes one more derivative right.
    """
    with full_precision(W.device):
        eigenvalues, V = torch.linalg.eigh(W.detach())
        x = eigenvalues.log()
        X: Tensor = (V * x[..., None, :]) @ V.mT
        half, mean = ((x[..., :, None] + sign * x[..., None, :]) / 2 for sign in (-1, 1))
        # Daleckii and Krein: (exp a - exp b) / (a - b) = exp((a + b)/2) sinh(h) / h with h = (a - b)/2
        inverse = torch.where(half == 0, 1, half / half.sinh()) * (-mean).exp()
        for _ in range(_DERIVATIVES if is_tracing() else 0):
            off = W - torch.linalg.matrix_exp(X)
            X = X + V @ (inverse * (V.mT @ (off - off.detach()) @ V)) @ V.mT
        return X
