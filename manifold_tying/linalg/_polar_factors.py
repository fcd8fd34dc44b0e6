"""The polar factors by matmuls, by eigenvalues and by singular values."""

import torch
from torch import Tensor

from manifold_tying.precision import check_finite, eye_like, gram, sym

# Smallest allowed ratio of a Gram matrix's eigenvalues, in either dtype. Its rounding is eps times the largest: in float32 one
# Newton-Schulz step still restores U; in float64 the error of U grows with the condition squared, to 1e5 eps at 8e3.
_SMALLEST_EIGENVALUE = torch.finfo(torch.float32).eps ** 0.5
_MAX_ROUNDS_UNPOLISHED = 2  # singular values down to 0.6 of the scale take two rounds: squaring them costs few digits


def polar_svd(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, V, h of the polar factors in float64, for any condition."""
    check_finite(Y)
    scale = Y.abs().amax((-2, -1), keepdim=True).double().clamp_min(1e-300)
    Q, R = torch.linalg.qr(Y.double() / scale)
    W, h, Vh = torch.linalg.svd(R)
    return ((Q @ W) @ Vh).to(Y.dtype), Vh.mT, h * scale[..., 0]


def polar_eigh(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., n, p), V (..., p, p) and h (..., p) with Y = U H, H = V diag(h) Vᵀ, from G = YᵀY; V and h in float64."""
    finite = bool(torch.isfinite(G).all())
    if finite:
        eigenvalues, V = torch.linalg.eigh(G.double())
        # Subnormal eigenvalues lose digits for any condition.
        type_info = torch.finfo(Y.dtype)
        threshold = (_SMALLEST_EIGENVALUE * eigenvalues[..., -1]).clamp_min(type_info.tiny / type_info.eps)
        finite = bool((eigenvalues[..., 0] > threshold).all())
    if not finite:
        return polar_svd(Y)
    h = eigenvalues.sqrt()
    U = Y @ ((V / h[..., None, :]) @ V.mT).to(Y.dtype)
    return _newton_schulz_step(U), V, h


def polar_matmuls(Y: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """U, H and, for n > p, H⁻¹ by matmuls, from G = YᵀY; None if they do not converge.

    A tall Y has the same H as its p x p Cholesky factor, and U = Y H⁻¹.
    """
    if Y.shape[-2] == Y.shape[-1]:
        U, _ = _orthogonal_factor(Y, G)
        return None if U is None else (U, sym(U.mT @ Y), None)
    L, info = torch.linalg.cholesky_ex(G)
    W, rounds = (None, 0) if info.any() else _orthogonal_factor(L.mT, G)
    if W is None:
        return None
    inverse = torch.linalg.solve_triangular(L.mT, W, upper=True)
    U = Y @ inverse
    if rounds > _MAX_ROUNDS_UNPOLISHED:
        U = _newton_schulz_step(U)
    return U, sym(L @ W), inverse


def _newton_schulz_step(U: Tensor) -> Tensor:
    """One Newton-Schulz step: removes the rounding of G, whose condition is that of Y squared."""
    G = gram(U)
    return U @ (1.5 * eye_like(G) - 0.5 * G)


def _orthogonal_factor(S: Tensor, G: Tensor) -> tuple[Tensor | None, int]:
    """The orthogonal polar factor of square S, from G = SᵀS, and the number of rounds; None unless S is near c Q.

    U <- U (I + E)^(-1/2) with E = UᵀU - I, by two, three or five terms of its series. The sums are positive for every E they
    are used for, so once UᵀU = I, UᵀS is positive definite.
    """
    eye = eye_like(G)
    root_p, type_info = G.shape[-1] ** 0.5, torch.finfo(G.dtype)
    enough = 2 * type_info.eps * root_p
    c = G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    if not c.amin() > type_info.tiny / type_info.eps:
        return None, 0
    U, E = S / c.sqrt(), G / c - eye
    for rounds in range(1, 6):
        size = torch.linalg.matrix_norm(E).amax()
        if not size < 0.5 * root_p:  # also where it is NaN
            break
        step, left = E / -2, size**2  # three eighths of that are left
        if left > enough:
            E2 = E @ E
            step, left = step + 0.375 * E2, size**3
            if left > enough:
                step, left = step + E2 @ (35 / 128 * E2 - 0.3125 * E), size**5
        U = U + U @ step
        if left <= enough:
            return U, rounds
        E = gram(U) - eye
    return None, 0
