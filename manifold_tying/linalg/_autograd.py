"""Custom gradients: the one rule for when a closed form is used and when torch differentiates plain operations.

A closed form serves one backward pass and nothing else: it saves intermediates that no graph leads to, reuses memory and
branches on values. Second derivatives, forward mode and torch.func need more. There the same function is computed by a plain
formula, made of operations that torch differentiates, so that every derivative is right.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, forward_ad
from torch.utils.checkpoint import checkpoint

from manifold_tying.linalg._precision import full_precision


def custom_gradient(
    function: type[Function], plain: Callable[..., Any], *, differentiable: bool = False
) -> Callable[..., Any]:
    """What to call in place of ``function.apply``: it, or ``plain`` where torch has to see every operation.

    Args:
        function: saves its arguments by :func:`save`. Its backward never runs where its own result is differentiated.
        plain: takes the same arguments and returns the same result. Tensors that need a gradient are among the arguments.
        differentiable: the backward is plain as well, and uses arguments and results only. ``save`` is then not needed.
    """
    backward = function.backward

    def guarded(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled graph has no second derivatives
            with torch.no_grad():
                return backward(ctx, *gradients)
        if not differentiable and (torch.is_grad_enabled() or in_transform()):
            return _differentiated(plain, ctx, gradients)
        return backward(ctx, *gradients)

    setattr(function, "backward", staticmethod(guarded))  # noqa: B010 - mypy: a method is not assigned

    def call(*args: Any) -> Any:
        return plain(*args) if in_transform() else function.apply(*args)

    return call


def recomputed(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``plain`` that keeps nothing but its arguments, and runs again in the backward, in full precision.

    Compiled code takes torch's checkpoint, whose backward only runs again what a gradient needs.
    """

    class Recomputed(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            save(ctx, args)
            return plain(*args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
            return _differentiated(plain, ctx, gradients)

    def call(*args: Any) -> Tensor:
        if in_transform() or not torch.is_grad_enabled():
            return plain(*args)
        if torch.compiler.is_compiling():
            return cast(Tensor, checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False))
        return cast(Tensor, Recomputed.apply(*args))

    return call


def no_second_derivative(result: Tensor, sources: Sequence[Tensor], why: str) -> Tensor:
    """The result of a backward, made of ``sources``: RuntimeError where it is differentiated in turn."""
    return _Refused.apply(result.detach(), why, *sources)


class _Refused(Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, why: str, *sources: Tensor) -> Tensor:
        ctx.why = why
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(f"there is no second derivative here: {ctx.why}")


def save(ctx: Any, args: Sequence[Any], *more: Tensor) -> None:
    """Save the arguments of a forward and whatever else its backward uses."""
    ctx.others = [None if isinstance(arg, Tensor) else (arg,) for arg in args]
    ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)), *more)


def saved(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    """The arguments and the other tensors that :func:`save` was given."""
    tensors = list(ctx.saved_tensors)
    args = [tensors.pop(0) if other is None else other[0] for other in ctx.others]
    return args, tensors


def in_transform() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Whether anything follows the operations here, so that none may write to given memory or depend on values."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or in_transform()


def has_data(x: Tensor) -> bool:
    """False for a tensor that has a shape only: on the meta device or under FakeTensorMode."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def flop_count(shape: Sequence[int], tall: int, square: int) -> int:
    """For FLOP counters: tall np² + square p³ for each matrix (n, p) of (..., n, p)."""
    *batch, n, p = shape
    return math.prod(batch) * p * p * (tall * n + square * p)


def _differentiated(
    plain: Callable[..., Any], ctx: Any, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of the arguments through the plain formula, differentiable in turn where grad mode is on."""
    needed = ctx.needs_input_grad
    args, _ = saved(ctx)
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with full_precision(device):
        with torch.enable_grad():
            # Views, so that the search for gradients ends here even where one argument depends on another.
            args = [arg.view_as(arg) if need else arg for arg, need in zip(args, needed, strict=True)]
            results = plain(*args)
        results = (results,) if isinstance(results, Tensor) else results
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
        wanted = [arg for arg, need in zip(args, needed, strict=True) if need]
        if not pairs:
            return (None,) * len(needed)
        ends, weights = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(ends, wanted, weights, create_graph=torch.is_grad_enabled(), allow_unused=True)
        )
    return tuple(next(found) if need else None for need in needed)
