"""The logarithm of symmetric positive definite matrices, differentiable to any order, also at repeated eigenvalues.

The gradient of an eigendecomposition divides by differences of eigenvalues. Here X = log W solves exp X = W, and its
derivatives are those of exp, inverted: Dexp(X)[dX] = dW is solved by divided differences (Daleckii and Krein).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from manifold_tying.linalg._polar_derivatives import batch_first, primals
from manifold_tying.precision import full_precision, sym


def spd_log(W: Tensor) -> Tensor:
    """log W of symmetric positive definite W (..., d, d), symmetric. Differentiable to any order, for all eigenvalues."""
    return _Log.apply(W)


class _Log(Function):
    @staticmethod
    def forward(W: Tensor) -> Tensor:
        eigenvalues, V = torch.linalg.eigh(W)
        with full_precision(W.device):
            return (V * eigenvalues.log()[..., None, :]) @ V.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Solve.apply(ctx.saved_tensors[0], sym(grad))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(True):
            return _Solve.apply(*primals(ctx.saved_tensors), sym(tangent))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *matrices: Tensor) -> tuple[Tensor, int]:
        return _Log.apply(*batch_first(info, in_dims, matrices)), 0


class _Solve(Function):
    """Y with Dexp(X)[Y] = E, for symmetric X and E: the derivative of log at exp X, which is self-adjoint."""

    @staticmethod
    def forward(X: Tensor, E: Tensor) -> Tensor:
        x, V = torch.linalg.eigh(X)
        half = (x[..., :, None] - x[..., None, :]) / 2
        mean = (x[..., :, None] + x[..., None, :]) / 2
        # (exp a - exp b) / (a - b) = exp((a + b)/2) sinh(h) / h with h = (a - b)/2
        ratio = torch.where(half == 0, 1, half / torch.where(half == 0, 1, half).sinh())
        with full_precision(X.device):
            return V @ (ratio * (-mean).exp() * (V.mT @ E @ V)) @ V.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        X, Y = ctx.saved_tensors
        of_E = _Solve.apply(X, sym(grad))
        return -_second_derivative_of_exp(X, Y, of_E), of_E

    @staticmethod
    def jvp(ctx: Any, of_X: Tensor, of_E: Tensor) -> Tensor:
        X, Y = primals(ctx.saved_tensors)
        with forward_ad._set_fwd_grad_enabled(True):
            return _Solve.apply(X, of_E - _second_derivative_of_exp(X, Y, of_X))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *matrices: Tensor) -> tuple[Tensor, int]:
        return _Solve.apply(*batch_first(info, in_dims, matrices)), 0


def _second_derivative_of_exp(X: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """D²exp(X)[A, B] of symmetric matrices: the corner of a block triangular exponential, and its transpose."""
    zero, d = torch.zeros_like(X), X.shape[-1]
    rows = ((X, A, zero), (zero, X, B), (zero, zero, X))
    with full_precision(X.device):
        corner = torch.linalg.matrix_exp(torch.cat([torch.cat(row, -1) for row in rows], -2))[..., :d, 2 * d :]
    return corner + corner.mT
