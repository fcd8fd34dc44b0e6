"""Doubly stochastic matrices: e^M scaled by Sinkhorn's rounds and Newton's method, and squares of orthogonal matrices.

Inside, batches are (n, n, b), so that sums over rows and columns are sums of vectors. Sources: the scaling of Sinkhorn and
Knopp (1967), the implicit gradient of Luise et al. (2018), elimination without subtractions: Grassmann, Taksar, Heyman (1985).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import Function, forward_ad

from manifold_tying.autograd import has_data
from manifold_tying.linalg._cayley import cayley
from manifold_tying.linalg._polar_derivatives import batch_first, primals
from manifold_tying.precision import check_square, compute_dtype, full_precision

_STEPS = 300  # normal entries times 1e6, 64 x 64, take 40
_RANGE = 20.0  # of log entries from which matrices are solved at a higher temperature first
_FAST = 16  # up to this size elimination on whole batches beats LAPACK
_ENTRIES = 2**18  # of a part of the batch, for a CPU's cache


def sinkhorn(M: Tensor) -> Tensor:
    """P = diag(eᵘ) e^M diag(eᵛ) of M (..., n, n): positive, and rows and columns sum to 1 to rounding.

    Rounds of Sinkhorn and Newton steps on u, to convergence. Entries more than 20 apart are reached from M/2ᵏ by doubling. The
    gradient is implicit: one n x n system. It has derivatives of any order; compiled code has the first ones. Other dtypes
    than float64 are computed in float32. NaN makes its matrix NaN. The host waits for a GPU at each Newton step, mostly 2 to 5.

    Raises:
        ValueError: M is not square or not floating.
        ArithmeticError: no convergence in 300 steps, as with infinite entries; compiled code makes such a batch NaN.
    """
    check_square(M)
    W = M.to(compute_dtype(M.dtype))
    with full_precision(M.device):
        if not torch.compiler.is_compiling():
            return cast(Tensor, _Sinkhorn.apply(W)).to(M.dtype)
        # Dynamo takes no Function with a vmap rule. The second term is 0 and has the gradient.
        P = _in_parts(_balanced, W.detach())
        return (P + _in_parts(_tangent, P, W - W.detach())).to(M.dtype)


def orthostochastic(A: Tensor) -> Tensor:
    """R ∘ R with R = (I - K)⁻¹(I + K), K = (A - Aᵀ)/2, of A (..., n, n): doubly stochastic by construction.

    Computed in float64 or float32. ValueError if A is not square or not floating. The gradient is 0 at A = 0.
    """
    check_square(A)
    W = A.to(compute_dtype(A.dtype))
    return cayley((W - W.mT) / 2).square().to(A.dtype)


class _Sinkhorn(Function):
    @staticmethod
    def forward(M: Tensor) -> Tensor:
        return _in_parts(_balanced, M) if has_data(M) else torch.empty_like(M)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with full_precision(grad.device):
            return _in_parts(_tangent, *ctx.saved_tensors, grad)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(True):
            return _in_parts(_tangent, *primals(ctx.saved_tensors), tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *matrices: Tensor) -> tuple[Tensor, int]:
        return _Sinkhorn.apply(*batch_first(info, in_dims, matrices)), 0


def _in_parts(function: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
    """A function of batches (n, n, b) on matrices (..., n, n)."""
    n = matrices[0].shape[-1]
    batches = [A.reshape(-1, n, n) for A in matrices]
    size = len(batches[0]) if torch.compiler.is_compiling() else max(1, _ENTRIES // n**2)
    parts = zip(*(A.split(size) for A in batches), strict=True)
    found = [function(*(A.movedim(0, -1).contiguous() for A in part)).movedim(-1, 0) for part in parts]
    return torch.cat(found).reshape(matrices[0].shape)


def _balanced(M: Tensor) -> Tensor:
    """P of M (n, n, b)."""
    L = M - M.amax(1, keepdim=True)
    L = L - L.amax(0, keepdim=True)
    heat = _RANGE / (-L.amin((0, 1))).clamp_min(_RANGE)
    state: Any = (torch.zeros((), dtype=torch.int64), heat, *_rounds(L * heat))
    if torch.compiler.is_compiling():
        _, *state = while_loop(lambda k, *rest: _unfinished(*rest) & (k < _STEPS), _newton, state)
        return state[-1].masked_fill(_unfinished(*state), torch.nan)
    while _unfinished(*state[1:]):
        if state[0] == _STEPS:
            raise ArithmeticError(f"e^M has no doubly stochastic scaling after {_STEPS} steps; are all entries finite?")
        state = _newton(*state)
    return state[-1]


def _rounds(L: Tensor) -> tuple[Tensor, Tensor]:
    """log P and P: e^L after five rounds of Sinkhorn. Columns come first, else Newton's step on the rows would be undone."""
    P = L.exp()
    C = P.sum(0)
    P = P / C
    R = torch.ones_like(P[:, :1])
    for _ in range(5):
        r = P.sum(1, keepdim=True)
        P = P / r
        c = P.sum(0)
        P, R, C = P / c, R * r, C * c
    return L - R.log() - C.log(), P


def _unfinished(heat: Tensor, L: Tensor, P: Tensor) -> Tensor:
    return ((heat < 1) | ((1 - P.sum(1)).abs().amax(0) > 8 * torch.finfo(P.dtype).eps)).any()


def _newton(k: Tensor, heat: Tensor, L: Tensor, P: Tensor) -> tuple[Tensor, ...]:
    """One step on u with the sums of columns kept, of at most 2, then rounds; matrices that are near to balance double."""
    excess = 1 - P.sum(1)
    step = _solve(P, excess)
    L = L + (step * (2 / step.abs().amax(0)).clamp_max(1))[:, None]
    factor = torch.where(excess.abs().amax(0) < 0.1, 2.0, 1.0).minimum(1 / heat)
    return k + 1, heat * factor, *_rounds(L * factor)


def _tangent(P: Tensor, G: Tensor) -> Tensor:
    """P ∘ (G - a 1ᵀ - 1 bᵀ) whose rows and columns sum to 0: the derivative of P along G, and its transpose."""
    H = P * G
    columns = H.sum(0)
    a = _solve(P, H.sum(1) - (P * columns).sum(1))[:, None]
    return H - P * (a + (columns - (P * a).sum(0)))


def _solve(P: Tensor, y: Tensor) -> Tensor:
    """x with (diag(P 1) - P Pᵀ) x = y, for P whose columns sum to 1 and y that sums to 0, (n, n, b) and (n, b)."""
    n, eps = len(P), torch.finfo(P.dtype).eps
    if n > _FAST:
        Q = P.movedim(-1, 0)
        A = torch.diag_embed(Q.sum(-1) + 4 * eps) - Q @ Q.mT + 1 / n  # Q Qᵀ 1 = Q 1; where it is singular, y is 0
        return torch.linalg.solve_ex(A, y.mT)[0].mT
    W = P[:, None, 0] * P[:, 0]
    for k in range(1, n):
        W = torch.addcmul(W, P[:, None, k], P[:, k])
    done = []
    while len(W) > 1:
        row = W[0, 1:]
        pivot = row.sum(0).clamp_min(eps)  # the sum of the other entries of the row, so nothing is subtracted
        share = row / pivot
        done.append((share, y[:1] / pivot))
        W, y = torch.addcmul(W[1:, 1:], share[:, None], row), y[1:] + share * y[:1]
    x = torch.zeros_like(y)
    for share, first in reversed(done):
        x = torch.cat([first + (share * x).sum(0, keepdim=True), x])
    return x - x.mean(0)
