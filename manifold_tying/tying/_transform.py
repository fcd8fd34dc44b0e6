"""Division by T = L Lᵀ, with a gradient that costs no more than it has to."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying import linalg


def divide_by_transform(rows: Tensor, L: Tensor) -> Tensor:
    """rows T⁻¹, (n, d) by two triangular solves: no inverse is formed."""
    return _divide(rows, L)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, L: Tensor) -> Tensor:
        quotient = _solve(rows, L)
        ctx.save_for_backward(quotient, L)
        return quotient

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # With E = Z T⁻¹: dE = dZ T⁻¹ - E dT T⁻¹, so T's gradient is -EᵀḠ T⁻¹: nothing but EᵀḠ has n rows where Z is frozen.
        quotient, L = ctx.saved_tensors
        grad_rows = grad_L = None
        if ctx.needs_input_grad[0]:
            grad_rows = _solve(grad, L)
        if ctx.needs_input_grad[1]:
            product = quotient.mT @ grad_rows if grad_rows is not None else _solve(quotient.mT @ grad, L)
            grad_L = -(product + product.mT) @ L  # through T = L Lᵀ
        return grad_rows, grad_L


def _solve(rows: Tensor, L: Tensor) -> Tensor:
    # As (T⁻¹ rowsᵀ)ᵀ, whose result lies row by row. One that lay column by column went wrong compiled: on a CPU, torch up to
    # 2.13 miscomputes a norm of such a tensor and its gradient, without a word (PyTorch's issue 185702).
    half = torch.linalg.solve_triangular(L, rows.mT, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True).mT


_divide = linalg.custom_gradient(_Divide, _solve, differentiable=True)
