"""Base class of all constraints, and the parametrization list that keeps the stored tensor in float32."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from manifold_tying import autograd, distributed, precision
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._points import KnownList


class Constraint(nn.Module, ABC):
    """A parametrization that maps the stored tensor to the weight; ``right_inverse`` projects a weight before storing it.

    The stored tensor stays at least float32 (:class:`Float32ParametrizationList`); the weight has the layer's dtype.

    The state dict has the buffer ``form``, the text of :meth:`describe` as bytes of UTF-8: the shape of a stored tensor does
    not tell which map makes a weight of it. A state with another form, or without one, is refused. The bytes are float32
    numbers, which survive casts and averages of whole state dicts.
    """

    call: str
    """The function that makes this constraint."""
    layout: Layout
    """Of a constraint that turns the weight into matrices."""
    dtype: torch.dtype
    """The layer's dtype, which the weight has."""
    form: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def describe(self) -> str:
        """Kind and options, written as the call that makes this constraint."""
        return f"{self.call}({self.extra_repr()})" + (f" on {self.layout}" if hasattr(self, "layout") else "")

    def weight_dtype(self, stored: Tensor) -> torch.dtype:
        """The layer's dtype, or a lower one in which FSDP2 gathers stored tensors by its policy."""
        return min(stored.dtype, self.dtype, key=lambda dtype: dtype.itemsize)

    def record_form(self, device: torch.device) -> None:
        """Register or renew ``form``."""
        form = torch.tensor(list(self.describe().encode()), dtype=torch.float32, device=device)
        self.register_buffer("form", form)

    def form_error(self, form: Tensor | None) -> str:
        """Why a state with this form cannot be loaded; "" if it can."""
        if form is None:
            saved = "missing: another library saved it, or the parameters alone were saved"
        elif not autograd.has_data(form) or (saved := _text(form)) == self.describe():
            return ""
        return (
            f"expected the state of {self.describe()}, but its form is {saved}. Constrain the weight as it was when it was "
            "saved, or assign it, which projects: layer.weight = other.weight"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        error = self.form_error(value) if name == "form" and isinstance(value, Tensor) else ""
        if not error:
            super().__setattr__(name, value)
        elif _FORM.match(_text(value)):  # transformers assigns the tensors of a checkpoint one by one
            raise ValueError(error)
        else:  # empty memory, since the checkpoint lacks this layer
            self.record_form(value.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if f"{prefix}form" in destination:  # safetensors rejects shared memory: a module may stand in a model twice
            destination[f"{prefix}form"] = self.form.clone()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The list that holds this constraint reports the error, before it loads the stored tensor.
        if not (any(key.startswith(prefix) for key in state) and self.form_error(state.get(f"{prefix}form"))):
            super()._load_from_state_dict(state, prefix, *rest)

    def layer_dtype_tensors(self) -> list[Tensor]:
        """The tensors that have the layer's dtype, so that .half() and .bfloat16() cast them."""
        return []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = dtype_after(fn, self.dtype)
        was_meta = "form" in self._buffers and self.form.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.form.is_meta:  # to_empty
            self.record_form(self.form.device)
        return self

    @staticmethod
    def warn_on_drift(found: Sequence[tuple[str, Any, Tensor]]) -> None:
        """Warn about the worst of (full name, constraint, stored tensor) whose map has left the manifold."""

    @abstractmethod
    def forward(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def right_inverse(self, weight: Tensor) -> Tensor: ...


def _text(form: Tensor) -> str:
    """The text of a form that may have been averaged or cast."""
    numbers = form.detach().double().nan_to_num().round().clamp(0, 255)
    return bytes(numbers.to(torch.uint8).tolist()).decode(errors="replace")


_FORM = re.compile(r"[a-z_]+(\(| on )")


def dtype_after(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """What a cast or move of ``nn.Module._apply`` makes of a dtype."""
    return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype


class Float32ParametrizationList(KnownList):
    """Parametrization list whose stored tensors stay float32 under .half() and .bfloat16(); only the weight's dtype changes."""

    label: str
    """Class of the layer, name and shape of the parameter: identifies it in messages when the full name is unknown."""
    weight_shape: torch.Size
    """Shape of the parameter, which that of the stored tensor may differ from."""

    @property
    def stored(self) -> list[Tensor]:
        """The stored tensors: "original", or "original0", "original1" and so on."""
        return [self.original] if self.is_tensor else [getattr(self, f"original{i}") for i in range(self.ntensors)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        found = [part for part in self.modules() if isinstance(part, Constraint)]
        layer_dtype = [tensor for part in found for tensor in part.layer_dtype_tensors()]
        dtypes = [dtype_after(fn, part.dtype) for part in found]

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not tensor.is_floating_point():
                return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)  # .type() casts indices, too
            if any(tensor is other for other in layer_dtype) or moved.dtype.itemsize >= 4:
                return moved
            return tensor.to(moved.device, torch.float32)

        super()._apply(wide, recurse)
        for part, dtype in zip(found, dtypes, strict=True):
            part.dtype = dtype
        return self

    def right_inverse(self, value: Tensor) -> None:
        """Assign a weight, cast from any floating dtype; if stored tensors are sharded, every rank has the same weight."""
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(self.stored[0].dtype)
        if not distributed.is_dtensor(self.stored[0]):
            super().right_inverse(value)
            return
        with torch.no_grad():
            for part in reversed(cast(list[Constraint], list(self))):
                value = part.right_inverse(value)
            for tensor, new in zip(self.stored, [value] if self.is_tensor else value, strict=True):
                distributed.to_local(tensor).copy_(distributed.shard_like(new, tensor))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        parts = [(f"{prefix}{i}.form", part) for i, part in enumerate(self) if isinstance(part, Constraint)]
        errors = [f"{key}: {error}" for key, part in parts if (error := part.form_error(state.get(key)))]
        if errors and any(key.startswith(prefix) for key in state):
            rest[-1].extend(errors)
            return
        super()._load_from_state_dict(state, prefix, *rest)
        if self.stored[0].dtype != precision.compute_dtype(cast(Constraint, self[0]).dtype):
            self.to(self.stored[0].dtype)  # assign=True replaced the stored tensor by one of another dtype
