"""Skew matrices and their Cayley maps."""

import torch
from torch import Tensor

from manifold_tying.linalg._basics import check_square, full_precision, identity_like, working_dtype


def cayley(A: Tensor) -> Tensor:
    """C = (I - A)⁻¹(I + A), orthogonal for skew A (..., b, b)."""
    dtype = working_dtype(A.dtype)
    check_square(A)
    with full_precision(A.device):
        W = A.to(dtype)
        eye = identity_like(W)
        return torch.linalg.solve(eye - W, eye + W).to(A.dtype)


def cayley_neumann(A: Tensor, terms: int = 2) -> Tensor:
    """R = (I + A) Σ_{i=0..terms} Aⁱ, the Cayley map with its inverse replaced by a truncated Neumann series.

    R = C (I - A^(terms+1)) with C the Cayley map, so ‖RᵀR - I‖ is about ‖A‖^(2 terms + 2) for an even number of terms and
    2‖A‖^(terms + 1) for an odd one: prefer even. Costs ``terms`` products. (POET, section 3; A skew, (..., b, b), ‖A‖ < 1.)
    """
    dtype = working_dtype(A.dtype)
    check_square(A)
    if not isinstance(terms, int) or terms < 1:
        raise ValueError(f"expected terms to be a whole number >= 1, got {terms!r}")
    with full_precision(A.device):
        W = A.to(dtype)
        eye = identity_like(W)
        S = eye + W
        for _ in range(terms - 1):
            S = eye + W @ S
        return (S + W @ S).to(A.dtype)


def skew(vector: Tensor, b: int) -> Tensor:
    """Skew matrix (..., b, b) from its b(b-1)/2 entries above the diagonal, row by row; inverse of :func:`unskew`."""
    if vector.shape[-1] != b * (b - 1) // 2:
        raise ValueError(f"expected {b * (b - 1) // 2} entries for b={b}, got {vector.shape[-1]}")
    rows, columns = torch.triu_indices(b, b, offset=1, device=vector.device)
    upper = vector.new_zeros(*vector.shape[:-1], b, b)
    upper[..., rows, columns] = vector
    return upper - upper.mT


def unskew(A: Tensor) -> Tensor:
    """The b(b-1)/2 entries of (..., b, b) above the diagonal, row by row."""
    check_square(A)
    rows, columns = torch.triu_indices(A.shape[-1], A.shape[-1], offset=1, device=A.device)
    return A[..., rows, columns]
