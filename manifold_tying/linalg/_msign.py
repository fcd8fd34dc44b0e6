"""The matrix sign M (MᵀM)^(-1/2), approximately, from the p x p Gram matrix; and the tangent one at a point of Stiefel."""

import torch
from torch import Tensor

from manifold_tying.distributed import Reduce, no_reduce
from manifold_tying.precision import add_symmetric_product_, check_int, eye_like, gram

# The polynomials a σ + b σ³ + c σ⁵ of Polar Express (Amsel et al. 2025, arXiv 2505.16932), for singular values from 1e-3 to 1.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)
_SAFETY = 1.02  # of the bound on eigenvalues: the first polynomial grows quickly beyond 1
_SMOOTHING = 0.1  # of the root mean square of the singular values


def msign(M: Tensor, reduce: Reduce = no_reduce) -> Tensor:
    """U Vᵀ of M = U Σ Vᵀ (..., n, p), the direction of steepest descent in the spectral norm, without an SVD.

    Singular values above 1e-3 of the largest become 1 within 1 %, smaller ones less. With ``reduce``, M is this rank's rows.
    Products follow ``torch.set_float32_matmul_precision``.
    """
    if M.shape[-2] < M.shape[-1] and reduce is no_reduce:
        return msign(M.mT).mT
    M = _normalized(M, reduce)
    return M @ _inverse_sqrt(reduce(gram(M)))


def tangent_msign(X: Tensor, M: Tensor, steps: int, reduce: Reduce = no_reduce) -> Tensor:
    """The tangent D at X (n x p, orthonormal columns) of spectral norm 1 with the largest tr MᵀD; for ``steps=0`` msign(P(M)).

    The dual problem is to minimize the nuclear norm of P(M) + XΛ over symmetric Λ, P the projection to the tangent space. Its
    norm is smoothed, tr (GᵀG + ε²)^(1/2), so that D = (P(M) + XΛ)(GᵀG + ε²)^(-1/2) is tangent at the optimum; each of the
    ``steps`` is one gradient step on Λ, all in p x p ("Modular Manifolds", Bernstein 2025).
    """
    check_int("steps", steps, 0)
    M = _normalized(M, reduce)
    A = reduce(X.mT @ M)
    M = M - X @ ((A + A.mT) / 2)
    A, G = (A - A.mT) / 2, reduce(gram(M))
    if steps == 0:
        return M @ _inverse_sqrt(G)
    L, eye = torch.zeros_like(A), eye_like(A)
    eps = _SMOOTHING * G.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].sqrt()
    for step in range(steps + 1):
        AL = A.mT @ L
        Q = _inverse_sqrt(G + AL + AL.mT + L @ L + eps.square() * eye)
        if step < steps:
            V = (A + L) @ Q
            L = L - 0.75 * eps * (V + V.mT)
    return M @ Q + X @ (L @ Q)


def _normalized(M: Tensor, reduce: Reduce) -> Tensor:
    """M with the largest entry of each matrix at 1, as squares of small gradients would be 0."""
    size = reduce(M.abs().amax((-2, -1), keepdim=True)) if M.numel() else reduce(M.new_zeros(*M.shape[:-2], 1, 1))
    return M / size.clamp_min(torch.finfo(M.dtype).tiny)


def _inverse_sqrt(G: Tensor) -> Tensor:
    """About G^(-1/2) for positive semidefinite G (..., p, p); where G is 0 it is finite."""
    H = G.reshape(-1, *G.shape[-2:])
    squares = _product(H, H)
    # ‖G²‖^(1/2) bounds the eigenvalues of G better than ‖G‖
    bound: Tensor = _SAFETY * torch.linalg.vector_norm(squares, dim=(-2, -1), keepdim=True).sqrt()
    bound = bound.clamp_min(torch.finfo(G.dtype).tiny ** 0.5)
    H = H / bound
    Q = Z = _polynomial(_POLAR_EXPRESS[0], H, squares / bound.square())
    for coefficients in _POLAR_EXPRESS[1:]:
        H = _product(_product(H, Z), Z)
        Z = _polynomial(coefficients, H, _product(H, H))
        Q = _product(Q, Z)
    return (Q / bound.sqrt()).view(G.shape)


def _polynomial(coefficients: tuple[float, float, float], H: Tensor, squares: Tensor) -> Tensor:
    a, b, c = coefficients
    Z = torch.add(b * H, squares, alpha=c)
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z


def _product(A: Tensor, B: Tensor) -> Tensor:
    """A B of matrices that commute and are symmetric."""
    return add_symmetric_product_(torch.empty_like(A), A, B, beta=0)
