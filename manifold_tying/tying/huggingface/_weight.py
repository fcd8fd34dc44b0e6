"""The head's weight as a lazily computed tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from manifold_tying import linalg
from manifold_tying.tying._pit import PIT


def head_weight(interface: PIT, dtype: torch.dtype) -> Tensor:
    """W_outᵀ (V, d) in dtype, lazy; eager for a sharded memory and in compiled code, which drops unused values."""
    parameters = tuple(interface.parameters())
    if torch.compiler.is_compiling() or any(map(linalg.is_dtensor, parameters)):
        return _compute(interface, dtype)
    return _Deferred.apply(interface, dtype, *parameters)


def _compute(interface: PIT, dtype: torch.dtype) -> Tensor:
    return interface.head_weight.to(dtype)


class _Lazy(Tensor):
    """Tensor with a shape and a dtype; the first operation on it computes its entries."""

    interface: PIT
    value: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # dispatch is handled below autograd

    @staticmethod
    def __new__(cls, interface: PIT, dtype: torch.dtype) -> "_Lazy":
        like: Any = Tensor
        shape, device = (interface.vocab_size, interface.hidden_size), next(interface.parameters()).device
        lazy = like._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy.interface, lazy.value = interface, None
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # static in torch's stubs
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map_only(cls, cls._computed, args), **tree_map_only(cls, cls._computed, kwargs or {}))

    def _computed(self) -> Tensor:
        if self.value is None:
            with torch.no_grad():
                self.value = _compute(self.interface, self.dtype)
        return self.value


class _Deferred(torch.autograd.Function):
    """A :class:`_Lazy` weight; backward recomputes it from the interface's parameters and passes the gradient to them."""

    @staticmethod
    def forward(ctx: Any, interface: PIT, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.interface, ctx.dtype = interface, dtype
        ctx.save_for_backward(*parameters)  # rejects backward after the parameters changed
        return _Lazy(interface, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trained = [p for p, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True) if needed]
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            weight = _compute(ctx.interface, ctx.dtype)
        found = iter(torch.autograd.grad(weight, trained, grads[0], create_graph=twice, allow_unused=True))
        return None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:])
