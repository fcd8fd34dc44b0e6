"""Doubly stochastic matrices: e^M scaled by Sinkhorn's rounds and Newton's method, and squares of orthogonal matrices.

Inside, batches are (n, n, b), so that sums over rows and columns are sums of vectors. Sources: the scaling of Sinkhorn and
Knopp (1967), the implicit gradient of Luise et al. (2018), elimination without subtractions: Grassmann, Taksar, Heyman (1985).
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.autograd import Function

from manifold_tying.linalg._cayley import cayley
from manifold_tying.precision import check_square, compute_dtype, full_precision


def sinkhorn(M: Tensor) -> Tensor:
    """P = diag(eᵘ) e^M diag(eᵛ) of M (..., n, n): positive, and rows and columns sum to 1 to rounding.

    Rounds of Sinkhorn and Newton steps on u, to convergence. Entries more than 20 apart are reached from M/2ᵏ by doubling. The
    gradient is implicit, one n x n system. It has derivatives of any order in reverse mode, compiled code the first ones; there
    is no forward mode, and an exported program, which needs this package, has no gradient. Other dtypes than float64 are
    computed in float32. NaN makes its matrix NaN. The host waits for a GPU at each Newton step, mostly 2 to 5.

    Raises:
        ValueError: M is not square or not floating, or has an infinite entry.
        ArithmeticError: no convergence in 300 steps; no finite M is known to cause it.
    """
    check_square(M)
    return cast(Tensor, _Sinkhorn.apply(M.to(compute_dtype(M.dtype)))).to(M.dtype)


def orthostochastic(A: Tensor) -> Tensor:
    """R ∘ R with R = (I - K)⁻¹(I + K), K = (A - Aᵀ)/2, of A (..., n, n): doubly stochastic by construction.

    Computed in float64 or float32, with the rounding of :func:`cayley`, which grows with ‖A‖². ValueError if A is not square or
    not floating. The gradient is 0 where R ∘ R is a permutation: at symmetric A, such as 0, it is the identity.
    """
    check_square(A)
    W = A.to(compute_dtype(A.dtype))
    return cayley((W - W.mT) / 2).square().to(A.dtype)


@torch.library.custom_op("manifold_tying::sinkhorn", mutates_args=())  # it branches on values, which no graph can
def _balance(M: Tensor) -> Tensor:
    if M.isinf().any():
        raise ValueError("expected M without infinite entries; a large negative number makes an entry nearly 0")
    return _in_parts(_balanced, M)


_balance.register_fake(lambda M: M.new_empty(M.shape))
_balance.register_vmap(lambda info, dims, M: (_balance(M.movedim(dims[0], 0)), 0))


class _Sinkhorn(Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda M: _balance(M))
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))
    backward = staticmethod(lambda ctx, grad: _in_parts(_tangent, *ctx.saved_tensors, grad))


def _in_parts(function: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    shape, n = matrices[0].shape, matrices[0].shape[-1]
    size = max(1, shape.numel() if torch.compiler.is_compiling() else 2**18 // n**2)  # which a CPU's cache holds
    with full_precision(matrices[0].device):
        parts = zip(*(A.reshape(-1, n, n).split(size) for A in matrices), strict=True)
        found = [function(*(A.movedim(0, -1).contiguous() for A in part)).movedim(-1, 0) for part in parts]
    return torch.cat(found).reshape(shape)


def _balanced(M: Tensor) -> Tensor:
    """P of M (n, n, b)."""
    L = M - M.amax(1, keepdim=True)
    L = L - L.amax(0, keepdim=True)
    heat = 20 / (-L.amin((0, 1))).clamp_min(20)  # a wider range is approached from a higher temperature
    P = (L * heat).exp()
    for _ in range(300):  # normal entries times 1e6, 64 x 64, take 40
        for dim in (0, 1) * 5 + (0,):  # columns first, else Newton's step on the rows would be undone
            P = P / P.sum(dim, keepdim=True)
        excess = 1 - P.sum(1)
        off = excess.abs().amax(0)
        if not ((heat < 1) | (off > 8 * torch.finfo(P.dtype).eps)).any():
            return P
        step = _solve(P, excess)
        P = P * (step * (2 / step.abs().amax(0)).clamp_max(1)).exp()[:, None]
        if (heat < 1).any():  # matrices that are near to balance double M
            factor = torch.where(off < 0.1, 2.0, 1.0).minimum(1 / heat)
            P, heat = P**factor, heat * factor
    raise ArithmeticError("e^M is not doubly stochastic after 300 steps; make the entries of M smaller")


def _tangent(P: Tensor, G: Tensor) -> Tensor:
    """P ∘ (G - a 1ᵀ - 1 bᵀ) whose rows and columns sum to 0: the derivative of P along G, and its transpose."""
    H = P * G
    columns = H.sum(0)
    a = _solve(P, H.sum(1) - (P * columns).sum(1))[:, None]
    return H - P * (a + (columns - (P * a).sum(0)))


def _solve(P: Tensor, y: Tensor) -> Tensor:
    """x with (diag(P 1) - P Pᵀ) x = y, for P whose columns sum to 1 and y that sums to 0, (n, n, b) and (n, b)."""
    if len(P) > 16:  # below, elimination on whole batches beats LAPACK
        Q = P.movedim(-1, 0)
        A = torch.diag_embed(Q.sum(-1) + 4 * torch.finfo(P.dtype).eps) - Q @ Q.mT + 1 / len(P)  # Q Qᵀ 1 = Q 1
        x: Tensor = torch.linalg.solve_ex(A, y.mT)[0].mT
        return x
    W = P[:, None, 0] * P[:, 0]
    for k in range(1, len(P)):
        W = torch.addcmul(W, P[:, None, k], P[:, k])
    return _eliminate(W, y)


def _eliminate(W: Tensor, y: Tensor) -> Tensor:
    """x that ends in 0 with Σⱼ Wᵢⱼ (xᵢ - xⱼ) = yᵢ, for symmetric W > 0; pivots are sums, so nothing is subtracted."""
    if len(W) == 1:
        return torch.zeros_like(y)
    row = W[0, 1:]
    pivot = row.sum(0).clamp_min(torch.finfo(W.dtype).eps)
    share = row / pivot
    x = _eliminate(torch.addcmul(W[1:, 1:], share[:, None], row), y[1:] + share * y[:1])
    return torch.cat([y[:1] / pivot + (share * x).sum(0, keepdim=True), x])
