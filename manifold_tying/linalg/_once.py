"""Second derivatives of closed-form gradients are refused, not wrong."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the ``backward`` of an autograd.Function: RuntimeError where its result is differentiated.

    torch's decorator of that name attaches the error only where the incoming gradient requires one. With a constant incoming
    gradient the second derivative by what the forward has saved would come out as zero, without a word.
    """
    refusing = function.once_differentiable(lambda ctx, wanted, *gradients: backward(ctx, *gradients))

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():  # has no second derivatives at all
            with torch.no_grad():
                return backward(ctx, *gradients)
        # the graph of the backward is wanted where gradients are enabled in it
        return refusing(ctx, torch.zeros((), requires_grad=torch.is_grad_enabled()), *gradients)

    return wrapper
