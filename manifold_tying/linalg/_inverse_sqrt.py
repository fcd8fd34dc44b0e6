"""G^(-1/2) and the polar factor by products alone."""

import torch
from torch import Tensor

from manifold_tying.linalg._basics import check_finite, full_precision, gram, identity_like, symmetric, working_dtype
from manifold_tying.linalg._polar import polar


def inverse_sqrt(G: Tensor) -> Tensor:
    """G^(-1/2) of symmetric positive definite G (..., p, p) by products alone, for G of condition up to about 1e6.

    Coupled Newton-Schulz iteration on G/c with c >= the largest eigenvalue, then one step of refinement in float64, since
    float32 alone leaves a residual of some 2e-6. Falls back to a float64 eigendecomposition where that does not converge,
    and in float32 for conditions above about 1e4, where a refinement would do harm.
    """
    eye = identity_like(G)
    # min(infinity norm, Frobenius norm) bounds the spectral norm, so all eigenvalues of G/c are in (0, 1].
    c = torch.minimum(G.abs().sum(-1).amax(-1), torch.linalg.matrix_norm(G))[..., None, None].clamp_min(1e-30)
    Y, P = G / c, eye.expand_as(G)
    tolerance = 1e-4 if G.dtype == torch.float32 else 1e-6  # the refinement squares what is left
    for _ in range(40):
        R = eye - P @ Y
        if not (size := torch.linalg.matrix_norm(R).amax()) > tolerance:  # also leaves when it is NaN
            break
        Q = eye + R / 2
        Y, P = Y @ Q, Q @ P
    if not size <= tolerance:
        return _inverse_sqrt_eigh(G)
    wide = symmetric(P.double()) / c.double().sqrt()
    for _ in range(1 if G.dtype == torch.float32 else 2):
        error = identity_like(wide) - wide @ G.double() @ wide
        # A refinement step multiplies the part of the error that does not commute with G by √cond(G)/4.
        if not torch.linalg.matrix_norm(error).amax() < 1e-3:
            return _inverse_sqrt_eigh(G)
        wide = wide + wide @ error / 2
    return symmetric(wide).to(G.dtype)


def _inverse_sqrt_eigh(G: Tensor) -> Tensor:
    check_finite(G)
    eigenvalues, V = torch.linalg.eigh(G.double())
    floor = eigenvalues[..., -1:] * 1e-15
    return ((V * eigenvalues.clamp_min(floor).rsqrt()[..., None, :]) @ V.mT).to(G.dtype)


def reorthonormalize(Y: Tensor) -> Tensor:
    """Polar factor Y (YᵀY)^(-1/2) by products alone, for Y (..., n, p) whose singular values are at least about 1.

    That is every retraction's case: a tangent step makes YᵀY = I + UᵀU >= I. Not differentiable; falls back to
    :func:`polar` after steps so large that float32 cannot resolve YᵀY.
    """
    with full_precision(Y.device):
        W = Y.to(working_dtype(Y.dtype))
        G = gram(W)
        largest = torch.linalg.matrix_norm(G, ord=float("inf")).amax()
        if not largest < 1e3:
            return polar(W)[0].to(Y.dtype)
        X = W @ inverse_sqrt(G)
        if largest > 4:  # rounding of G^(-1/2) grows with the condition of G
            X = X @ (1.5 * identity_like(G) - 0.5 * gram(X))
        return X.to(Y.dtype)
