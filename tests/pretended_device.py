"""Tensors on a CUDA device that is not there: wrappers around CPU tensors that keep CUDA's rules.

An operation that mixes devices raises, as on a GPU. What makes the host wait for the device is recorded, and raises under
``torch.cuda.set_sync_debug_mode("error")``. A copy to the host that is not waited for holds garbage until the host has waited.
With TF32 on, products round their factors to it.

    with Pretended():
        layer = layer.to("cuda")

With ``pytest -p pretended_device`` every test runs so.
"""

# ruff: noqa: E402
from benchmarks._pretended import WAITS, install

install()  # before the first import of torch

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

_MIXES = frozenset("_to_copy copy_ index index_put_ _index_put_impl_ set_".split())  # may take CPU tensors, too
_PRODUCTS = frozenset("mm bmm addmm addmm_ baddbmm baddbmm_".split())  # whose last two arguments are the factors


class Synchronization(RuntimeError):
    """The host waits for the device where it must not."""


class Host:
    """The host: what it has waited for, and the copies that have not arrived yet."""

    refuses = False
    waits: ClassVar[list[str]] = []
    _flying: ClassVar[list[tuple[Tensor, Tensor]]] = []

    @classmethod
    def wait(cls, why: str) -> None:
        cls.waits.append(why)
        if cls.refuses:
            raise Synchronization(f"called a synchronizing CUDA operation: {why}")
        while cls._flying:
            destination, value = cls._flying.pop()
            destination.copy_(value)

    @classmethod
    def receive(cls, value: Tensor) -> Tensor:
        """The destination of a copy that nobody waits for: garbage until the host waits."""
        garbage = torch.full_like(value, float("nan") if value.is_floating_point() else 1)
        cls._flying.append((garbage, value.clone()))
        return garbage


class Event:
    """Done once the host has waited after it was recorded: the slowest device there is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = 0

    def record(self, *_: Any) -> None:
        self._recorded = len(Host.waits)

    def query(self) -> bool:
        return len(Host.waits) > self._recorded

    def synchronize(self) -> None:
        Host.wait("Event.synchronize")


no_waiting = partial(patch.object, Host, "refuses", True)
cuda: Any = torch.cuda
cuda.Event, cuda.synchronize = Event, lambda *_: Host.wait("torch.cuda.synchronize")
cuda.get_sync_debug_mode = lambda: 2 * Host.refuses
cuda.set_sync_debug_mode = lambda mode: setattr(Host, "refuses", mode in ("error", 2))
build: Any = torch._C
build._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes asks for it when it is imported
_Tensor: Any = Tensor  # its stubs forbid what a wrapper overrides


class CudaTensor(_Tensor):
    """A CPU tensor that says it is on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return _Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device="cuda:0",
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        Host.wait("tolist")
        return self.inner.tolist()

    @property
    def data(self) -> Any:
        return _Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        _Tensor.data.__set__(self, value)
        self.inner = value.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """Inside, tensors may be made on "cuda" and moved there; modules too."""

    def __enter__(self) -> Any:
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") then copies, as on a GPU
        # A parameter on the CPU cannot become a wrapper in place: .to() makes a new one.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self.before)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    leaves = pytree.tree_leaves((args, kwargs))
    mine = [x for x in leaves if isinstance(x, CudaTensor)]
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, CudaTensor)]
    target = kwargs.get("device")
    to_device = target is not None and torch.device(target).type == "cuda"
    if not mine and not to_device:
        return func(*args, **kwargs)
    _check(func, name, args, kwargs, mine, others, to_device)
    on_device = isinstance(args[0], CudaTensor) if name == "copy_" else to_device or target is None
    given = {id(t.inner): t for t in mine}  # what was changed in place comes back as it was given

    def unwrap(x: Any) -> Any:
        return x.inner if isinstance(x, CudaTensor) else x

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, CudaTensor):
            return x
        return given[id(x)] if id(x) in given else CudaTensor(x)

    plain, options = pytree.tree_map(unwrap, (list(args), kwargs))
    options.pop("pin_memory", None)
    if name in _PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
        plain[-2:] = map(_tf32, plain[-2:])
    if to_device:
        options["device"] = torch.device("cpu")
    result = func(*plain, **options)
    if not on_device:
        return Host.receive(result) if name == "_to_copy" and kwargs.get("non_blocking") else result
    wrapped = pytree.tree_map(wrap, result)
    aliases = any(part.alias_info for part in (*func._schema.arguments, *func._schema.returns))
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if aliases and name != "_to_copy" else wrapped


def _check(func: Any, name: str, args: Any, kwargs: Any, mine: Any, others: list[Tensor], to_device: bool) -> None:
    """Raise for a mix of devices; have the host wait where it would."""
    mixed = [x.shape for x in others if x.ndim or name == "cat" or (name.startswith("_fused") and x.numel() != 1)]
    if mine and mixed and name not in _MIXES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, got cuda:0 and cpu {mixed}")
    blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    if name == "_to_copy":
        leaves = bool(mine) != (to_device or kwargs.get("device") is None)
        if (leaves or not mine) and blocking:
            Host.wait(f"copy {'to' if to_device else 'from'} the device, {tuple(args[0].shape)}")
    elif name == "copy_" and others and blocking:
        Host.wait(f"copy_ between host and device, {tuple(args[0].shape)}")
    elif name in ("index", "index_put_", "_index_put_impl_"):
        for index in args[1]:
            if index is not None and (index.dtype in (torch.bool, torch.uint8) or not isinstance(index, CudaTensor)):
                Host.wait(f"{name} with a mask, or with an index on the host")
    elif name in WAITS or kwargs.get("check_errors"):
        Host.wait(name)


def _tf32(x: Any) -> Any:
    """Rounded to ten bits behind the point."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(autouse=True)
def _pretended() -> Iterator[None]:
    with Pretended():
        yield
