"""Orthonormal columns by the polar factor, Householder QR or Cholesky-QR."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manifold_tying.linalg._basics import check_finite, check_tall, full_precision, gram, identity_like, working_dtype
from manifold_tying.linalg._polar import polar

Orthonormalization = Literal["polar", "qr", "cholesky-qr"]


def orthonormalize(Y: Tensor, method: Orthonormalization = "polar") -> Tensor:
    """Orthonormal columns that span the columns of Y (..., n, p), n >= p.

    "polar" is the nearest such matrix; "qr" is the Q of Householder QR with R's diagonal > 0; "cholesky-qr" is the same Q by
    two Cholesky factorizations of Gram matrices, falling back to Householder where those break down (condition about 1e3 in
    float32). All are differentiable once in closed form.
    """
    check_tall(Y)
    if method not in get_args(Orthonormalization):
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(get_args(Orthonormalization))}")
    if method == "polar":
        return polar(Y)[0]
    with full_precision(Y.device):
        return _QR.apply(Y.to(working_dtype(Y.dtype)), method == "cholesky-qr").to(Y.dtype)


def _cholesky_qr(Y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Q, R by Cholesky-QR twice, or None where Y is too ill-conditioned for it."""
    L, info = torch.linalg.cholesky_ex(gram(Y))
    if info.any() or not torch.isfinite(L).all():
        return None
    Q = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    G = gram(Q)
    if not torch.linalg.matrix_norm(G - identity_like(G)).amax() < 0.1:
        return None
    L2 = torch.linalg.cholesky(G)
    return torch.linalg.solve_triangular(L2.mT, Q, upper=True, left=False), (L @ L2).mT


class _QR(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Y: Tensor, by_cholesky: bool) -> Tensor:
        factors = _cholesky_qr(Y) if by_cholesky else None
        if factors is None:
            check_finite(Y)
            Q, R = torch.linalg.qr(Y)
            sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Y.dtype)
            factors = Q * sign[..., None, :], R * sign[..., :, None]
        Q, R = (factor.contiguous() for factor in factors)
        ctx.save_for_backward(Q, R)
        return Q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Q: Tensor) -> tuple[Tensor, None]:
        # Ȳ = (Q̄ + Q copyltu(-Q̄ᵀQ)) R⁻ᵀ with copyltu(M) = tril(M) + tril(M, -1)ᵀ.
        Q, R = ctx.saved_tensors
        with full_precision(Q.device):
            M = -(grad_Q.mT @ Q)
            inside = grad_Q + Q @ (M.tril() + M.tril(-1).mT)
            return torch.linalg.solve_triangular(R.mT, inside, upper=False, left=False), None
