"""Custom gradients: when a closed form is used, and when torch differentiates plain operations.

A closed form serves one backward pass only: it saves intermediates outside the graph, reuses memory and branches on values.
Second derivatives, forward mode and torch.func need more. For them the same function is computed by a plain formula of
differentiable operations, so that every derivative is right.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, forward_ad
from torch.utils.checkpoint import checkpoint

from manifold_tying.precision import full_precision

T = TypeVar("T")


def custom_gradient(
    function: type[Function], plain: Callable[..., T], *, differentiable: bool = False
) -> Callable[..., T]:
    """A replacement for ``function.apply`` that falls back to ``plain`` when torch must see every operation.

    Args:
        function: saves its arguments by :func:`save`. Its backward never runs if its own result is differentiated.
        plain: takes the same arguments and returns the same result. All tensors that need a gradient are arguments.
        differentiable: the backward also consists of plain operations and uses only arguments and results, so ``save`` is
            not needed.
    """
    backward = function.backward

    def guarded(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled graph has no second derivatives
            with torch.no_grad():
                return backward(ctx, *gradients)
        is_batched = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched
        batched = any(g is not None and is_batched(g) for g in gradients)
        if not differentiable and (torch.is_grad_enabled() or in_transform() or batched):
            return _plain_gradients(plain, ctx, gradients)
        return backward(ctx, *gradients)

    setattr(function, "backward", staticmethod(guarded))  # noqa: B010 - mypy: a method is not assigned

    def call(*args: Any) -> Any:
        # Strict export drops the gradient of a Function.
        return plain(*args) if in_transform() or is_exporting() else function.apply(*args)

    return call


def recomputed(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``plain``, saving only its arguments and running again in the backward, in full precision.

    Compiled code uses torch's checkpoint, whose backward only recomputes what a gradient needs.
    """

    class Recomputed(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            save(ctx, args)
            return plain(*args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
            return _plain_gradients(plain, ctx, gradients)

    def call(*args: Any) -> Tensor:
        if in_transform() or not torch.is_grad_enabled() or is_exporting():
            return plain(*args)
        if torch.compiler.is_compiling():
            return cast(Tensor, checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False))
        return cast(Tensor, Recomputed.apply(*args))

    return call


def save(ctx: Any, args: Sequence[Any], *more: Tensor) -> None:
    """Save the arguments of a forward and further tensors for its backward."""
    ctx.others = [None if isinstance(arg, Tensor) else (arg,) for arg in args]
    ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)), *more)


def saved(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """The arguments and the further tensors that :func:`save` stored."""
    tensors = list(ctx.saved_tensors)
    args = [tensors.pop(0) if other is None else other[0] for other in ctx.others]
    return args, tensors


def in_transform() -> bool:
    """Whether a torch.func transform, forward-mode differentiation or torch.jit.trace is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch.jit.is_tracing()


def is_tracing() -> bool:
    """Whether operations are recorded (compile, autograd, transforms): then no out= and no branches on values."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or in_transform()


def is_exporting() -> bool:
    """Whether torch.export traces. In code that torch 2.11 compiles, ``torch.compiler.is_exporting`` is always true."""
    return torch.compiler._is_exporting_flag


def has_data(x: Tensor) -> bool:
    """False for a tensor without values: on the meta device or under FakeTensorMode."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def flop_count(shape: Sequence[int], tall: int, square: int) -> int:
    """For FLOP counters: tall np² + square p³ per matrix (n, p) of (..., n, p)."""
    *batch, n, p = shape
    return math.prod(batch) * p * p * (tall * n + square * p)


def _plain_gradients(
    plain: Callable[..., Any], ctx: Any, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments through the plain formula, themselves differentiable if grad mode is on."""
    needed = ctx.needs_input_grad
    args, _ = saved(ctx)
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with full_precision(device):
        with torch.enable_grad():
            # Views end the graph here, even if one argument depends on another.
            args = [arg.view_as(arg) if need else arg for arg, need in zip(args, needed, strict=True)]
            results = plain(*args)
        results = (results,) if isinstance(results, Tensor) else results
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
        wanted = [arg for arg, need in zip(args, needed, strict=True) if need]
        if not pairs:
            return (None,) * len(needed)
        ends, weights = zip(*pairs, strict=True)
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(ends, wanted, weights, create_graph=again, allow_unused=True))
    return tuple(next(found) if need else None for need in needed)
