"""How well embedding and unembedding agree."""

import torch
from torch import Tensor

from manifold_tying import linalg


def delta_ti(E: Tensor, W_out: Tensor) -> float:
    """ΔTI = ‖W_out E - I‖_F of an embedding E (V, d) and an unembedding W_out (d, V), in float64. (PIT, equation 14.)"""
    if E.ndim != 2 or W_out.shape != E.shape[::-1]:
        raise ValueError(f"expected E (V, d) and W_out (d, V), got {tuple(E.shape)} and {tuple(W_out.shape)}")
    product = W_out.detach().double() @ E.detach().double()
    return torch.linalg.matrix_norm(product - linalg.identity_like(product)).item()


def condition(T: Tensor) -> float:
    """Largest over smallest eigenvalue of a symmetric positive definite T (d, d), in float64."""
    eigenvalues = torch.linalg.eigvalsh(T.detach().double())
    return (eigenvalues[-1] / eigenvalues[0]).item()
