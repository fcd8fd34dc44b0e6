"""Products with T = L Lᵀ and its inverse, with gradients that cost no more than they have to."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying import linalg


def multiply_by_transform(rows: Tensor, L: Tensor) -> Tensor:
    """rows T, (n, d) by one product with T, or by L and Lᵀ where there are fewer rows than columns."""
    if len(rows) < len(L):
        return (rows @ L) @ L.mT
    return _multiply(rows, L)


def divide_by_transform(rows: Tensor, L: Tensor) -> Tensor:
    """rows T⁻¹, (n, d) by two triangular solves: no inverse is formed."""
    return _divide(rows, L)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, L: Tensor) -> Tensor:
        T = L @ L.mT
        ctx.save_for_backward(rows, L, T)
        return rows @ T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, L, T = ctx.saved_tensors
        if torch.is_grad_enabled():  # T, once saved, is a constant
            T = L @ L.mT
        return (
            grad @ T if ctx.needs_input_grad[0] else None,
            _through_square(rows.mT @ grad, L) if ctx.needs_input_grad[1] else None,
        )


_multiply = linalg.closed_form(_Multiply, lambda rows, L: rows @ (L @ L.mT), differentiable=True)


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
            grad_L = _through_square(-product, L)
        return grad_rows, grad_L


def _solve(rows: Tensor, L: Tensor) -> Tensor:
    # As (T⁻¹ rowsᵀ)ᵀ, whose result lies row by row. One that lay column by column went wrong compiled: on a CPU, torch up to
    # 2.13 miscomputes a norm of such a tensor and its gradient, without a word (PyTorch's issue 185702).
    half = torch.linalg.solve_triangular(L, rows.mT, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True).mT


_divide = linalg.closed_form(_Divide, _solve, differentiable=True)


def _through_square(grad_T: Tensor, L: Tensor) -> Tensor:
    """The gradient with respect to L of a function of T = L Lᵀ, from that with respect to T."""
    return (grad_T + grad_T.mT) @ L
