"""Division by T = L Lᵀ, with a cheap gradient."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying import autograd


def solve_transform(rows: Tensor, L: Tensor) -> Tensor:
    """rows T⁻¹, (n, d), by two triangular solves, without forming an inverse."""
    return _divide(rows, L)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, L: Tensor) -> Tensor:
        quotient = _solve(rows, L)
        ctx.save_for_backward(quotient, L)
        return quotient

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # E = Z T⁻¹: dE = dZ T⁻¹ - E dT T⁻¹, so T's gradient is -EᵀḠ T⁻¹. With a frozen Z only EᵀḠ has n rows.
        quotient, L = ctx.saved_tensors
        grad_rows = grad_L = None
        if ctx.needs_input_grad[0]:
            grad_rows = _solve(grad, L)
        if ctx.needs_input_grad[1]:
            product = quotient.mT @ grad_rows if grad_rows is not None else _solve(quotient.mT @ grad, L)
            grad_L = -(product + product.mT) @ L  # through T = L Lᵀ
        return grad_rows, grad_L


def _solve(rows: Tensor, L: Tensor) -> Tensor:
    # (T⁻¹ rowsᵀ)ᵀ gives a row-major result. Compiled for a CPU, torch up to 2.13 silently miscomputes the norm of a
    # column-major one and its gradient (pytorch/pytorch#185702).
    half = torch.linalg.solve_triangular(L, rows.mT, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True).mT


_divide = autograd.custom_gradient(_Divide, _solve, differentiable=True)
