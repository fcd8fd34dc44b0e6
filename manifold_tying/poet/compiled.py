"""POET layers in compiled code: the compiler sees the kernels within these operations, and launches them itself."""

from typing import Any

import torch
from torch import Tensor

from manifold_tying.poet.columns import backward, forward
from manifold_tying.poet.spec import BlockSpec, RotationSpec


@torch.library.triton_op("manifold_tying::poet_linear", mutates_args={})
def _linear(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, sizes: list[int]
) -> list[Tensor]:
    y, products, of_blocks = forward(x, W0, skew_params, rows, columns, _spec(sizes), True)
    return [y, *products, *of_blocks]


@torch.library.triton_op("manifold_tying::poet_linear_backward", mutates_args={})
def _linear_backward(
    grad: Tensor, x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, sizes: list[int],
    kept: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return backward(grad, (x, W0, skew_params, rows, columns, _spec(sizes), True), kept[:1], kept[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.sizes = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _call_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    x, W0, skew_params, rows, columns, *kept = ctx.saved_tensors
    grad_x, grad_skew = _linear_backward(grads[0], x, W0, skew_params, rows, columns, ctx.sizes, kept)
    return grad_x, None, grad_skew, None, None, None


_linear.register_autograd(_call_backward, setup_context=_save)


def compiled_linear(
    x: Tensor, W0: Tensor, skew_params: Tensor, rows: Tensor, columns: Tensor, spec: RotationSpec
) -> Tensor:
    """x Wᵀ by the kernels, for compiled code."""
    sizes = [spec.R.n, spec.R.block, spec.R.num_rotated, spec.P.n, spec.P.block, spec.P.num_rotated, spec.terms or 0]
    y: Tensor = _linear(x, W0, skew_params, rows, columns, sizes)[0]
    return y


def _spec(sizes: list[int]) -> RotationSpec:
    return RotationSpec(BlockSpec(*sizes[:3]), BlockSpec(*sizes[3:6]), sizes[6] or None)
