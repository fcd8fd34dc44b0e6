"""The two halves of a token interface in a transformers model, and the head's deferred weight."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from manifold_tying import distributed
from manifold_tying.tying import PIT


def head_weight(interface: PIT, dtype: torch.dtype) -> Tensor:
    """W_outᵀ (V, d) in dtype, lazy; eager for a sharded memory and in compiled code, which drops unused values."""
    parameters = tuple(interface.parameters())
    if torch.compiler.is_compiling() or any(map(distributed.is_dtensor, parameters)):
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


class _Half(nn.Module):
    """One side of an interface. Both sides share one PIT module, so replacing tensors cannot untie them."""

    def __init__(self, interface: PIT) -> None:
        super().__init__()
        self.interface = interface

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "interface" and not isinstance(value, PIT):
            raise self.untying(f"replacing its interface by {type(value).__name__}")
        super().__setattr__(name, value)

    def untying(self, what: str) -> ValueError:
        """The error for ``what`` parts the halves."""
        return ValueError(
            f"{type(self).__name__} is one half of a tied pair: {what} would untie the halves. Copy or wrap the full model. "
            "With PEFT, remove embedding, head and interface from modules_to_save and trainable_token_indices; to train and "
            "save the interface, call manifold_tying.huggingface.train_interface(peft_model) instead"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Half":
        if not memo:  # not part of a copy of the model
            raise self.untying("copying it alone")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


class PITEmbedding(_Half):
    """Token ids (...) to scale · z T⁻¹ (..., d). A padding row gets no gradient from its lookup, as in ``nn.Embedding``.

    ``weight`` (V, 0) is an empty tensor under the name of the stock table. It records the model's dtype and vocabulary (PEFT
    looks for a parameter with V rows). Its shape makes other readers reject the checkpoint. ``rotated`` is True if the
    residual stream was rotated, see ``rotation_scales``.
    """

    def __init__(
        self,
        interface: PIT,
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
        padding_idx: int | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__(interface)
        device = next(interface.parameters()).device
        empty = torch.empty(interface.vocab_size, 0, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.num_embeddings = interface.vocab_size
        self.embedding_dim = interface.hidden_size
        self.scale = scale
        self.padding_idx = padding_idx
        self.rotated = rotated
        self.saved_with_adapters = False
        self.register_state_dict_pre_hook(_warn_of_adapters)

    def forward(self, input_ids: Tensor) -> Tensor:
        e = self.interface(input_ids)  # not embed(): offloading hooks run only on a call
        if self.padding_idx is not None and torch.is_grad_enabled():
            e = torch.where((input_ids == self.padding_idx)[..., None], e.detach(), e)
        # The factor has the model's dtype, as in Gemma 3.
        return e if self.scale == 1.0 else e * torch.full((), self.scale, dtype=e.dtype, device=e.device)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, padding_idx={self.padding_idx}"


def _warn_of_adapters(embedding: "PITEmbedding", prefix: str, keep_vars: bool) -> None:
    """Warn if a PeftModel with a trainable interface is saved without it."""
    trains = any(p.requires_grad for p in embedding.interface.parameters())
    if prefix.startswith("base_model.") and trains and not embedding.saved_with_adapters:
        warnings.warn(
            "PEFT's save_pretrained, which Trainer calls, does not save the trained interface: Z and T would be lost. Call "
            "manifold_tying.huggingface.train_interface(peft_model) once to save them with the adapters",
            stacklevel=2,
        )


class PITHead(_Half):
    """Hidden states (..., d) to h T Zᵀ + bias (..., V)."""

    bias: nn.Parameter | None
    _like: Tensor

    def __init__(self, interface: PIT, dtype: torch.dtype, bias: nn.Parameter | None = None) -> None:
        super().__init__(interface)
        device = next(interface.parameters()).device
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.register_parameter("bias", bias)
        self.in_features = interface.hidden_size
        self.out_features = interface.vocab_size

    @property
    def weight(self) -> Tensor:
        """W_outᵀ (V, d), for code that multiplies by it (TRL, Liger); computed at the first operation on it.

        Reading its dtype and shape, as Mamba and ``tie_weights`` do, is free. Gradients reach Z, L and the bridge.
        """
        return head_weight(self.interface, self._like.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.interface(hidden_states, head=True)
        return logits if self.bias is None else logits + self.bias
