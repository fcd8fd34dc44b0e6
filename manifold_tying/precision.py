"""Precision, argument checks and Gram matrices for the functions of this package."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor

_BLOCK_ENTRIES, _GPU_BLOCK_ENTRIES = 2**20, 2**24
_MAX_SUM_LENGTH = 4096  # maximum length of a float32 sum
_PANELS_FROM = 192  # columns of a symmetric product from which half of it takes less time than all


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, if it is on."""
    return torch.autocast(device.type, enabled=False) if is_autocast_on(device) else nullcontext()


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for a device; False for devices without autocast."""
    known = device.type in ("cpu", "cuda")  # PyTorch 2.11 cannot trace the question about others
    return (known or torch.amp.is_autocast_available(device.type)) and torch.is_autocast_enabled(device.type)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 matmuls in float32: no autocast, no TF32 (nor its bfloat16 counterpart on CPUs)."""
    with disable_autocast(device):
        # Compiled code uses the setting at trace time; a graph cannot change it.
        if torch.compiler.is_compiling():
            yield
            return
        # torch.get_float32_matmul_precision() raises once a user has set one of these.
        products: Any = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
        precision = products.fp32_precision
        if precision in ("none", "ieee"):
            yield
            return
        products.fp32_precision = "none"  # inherits from torch.backends, as the old value may have
        before = "none" if products.fp32_precision == precision else precision
        products.fp32_precision = "ieee"
        try:
            yield
        finally:
            products.fp32_precision = before


def _native_products() -> frozenset[torch.dtype]:
    """The 16-bit dtypes in which this CPU multiplies matrices; torch emulates the others, through float32 copies or loops."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch.cpu._is_avx512_supported():  # then oneDNN accepts bfloat16 even if it has to emulate it
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
        bfloat16 &= torch.cpu._is_avx512_bf16_supported() and limit not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    float16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return frozenset(dtype for dtype, native in ((torch.bfloat16, bfloat16), (torch.float16, float16)) if native)


_NATIVE_PRODUCTS = _native_products()


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to multiply ``dtype`` matrices in: float32 on a CPU that emulates their products, 1.5 to 20 times faster."""
    emulated = device.type == "cpu" and dtype.itemsize < 4 and dtype not in _NATIVE_PRODUCTS
    return torch.float32 if emulated else dtype


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other floating dtype; ValueError for the rest."""
    if not dtype.is_floating_point:
        raise ValueError(f"expected a real floating dtype, got {dtype}; convert the tensor with .float()")
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of nn.Linear's matmul with x: autocast's if it is on, except for float64."""
    lowers = is_autocast_on(x.device) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowers else x.dtype


def check_tall(Y: Tensor, what: str = "matrix") -> None:
    """ValueError unless Y is floating with shape (..., n, p), n >= p >= 1."""
    compute_dtype(Y.dtype)
    if Y.ndim < 2 or Y.shape[-1] < 1 or Y.shape[-2] < Y.shape[-1]:
        raise ValueError(f"expected a {what} (..., n, p) with n >= p >= 1, got {tuple(Y.shape)}; transpose it?")


def check_square(A: Tensor) -> None:
    """ValueError unless A has the shape (..., b, b)."""
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"expected a square matrix (..., b, b), got {tuple(A.shape)}")


def check_finite(Y: Tensor) -> None:
    """ValueError if Y contains NaN or Inf."""
    if not torch.isfinite(Y).all():
        raise ValueError("expected a finite matrix, but it contains NaN or Inf")


def check_int(name: str, value: object, least: int, otherwise: str = "") -> None:
    """ValueError unless value is an integer >= least; a bool is not an integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected {name} to be an integer >= {least}{otherwise}, got {value!r}")


def check_choice(name: str, value: object, choices: Any) -> None:
    """ValueError unless value is one of the words of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(get_args(choices))}")


def gram(Y: Tensor) -> Tensor:
    """YᵀY, (..., n, p) to (..., p, p)."""
    p = Y.shape[-1]
    if p < 16 and Y.dtype == torch.float32:
        # CPU kernels for narrow matrices sum rows sequentially: relative errors of 4e-5 for 200000 rows.
        wide = Y.double()
        return (wide.mT @ wide).to(Y.dtype)
    if Y.is_cuda and Y.ndim == 2 and len(Y) > _MAX_SUM_LENGTH:
        # A GPU may sum all rows sequentially in float32: a defect of 3e-5 at 151,936 rows.
        first, *others = Y.split(_MAX_SUM_LENGTH)
        G: Tensor = first.mT @ first
        for part in others:
            G.addmm_(part.mT, part)
        return G
    if Y.ndim > 2 or p < _PANELS_FROM or Y.is_cuda:
        return Y.mT @ Y
    return add_symmetric_product_(Y.new_empty(p, p), Y.mT, Y, beta=0)


def add_symmetric_product_(C: Tensor, A: Tensor, B: Tensor, beta: float = 1) -> Tensor:
    """C <- beta C + A B in place, for a symmetric result: a matrix (p, p) or a batch of them (m, p, p)."""
    p = C.shape[-1]
    if p < _PANELS_FROM or C.is_cuda or (C.ndim > 2 and len(C) > 1):
        return (C.addmm_ if C.ndim == 2 else C.baddbmm_)(A, B, beta=beta)
    if C.ndim > 2:
        add_symmetric_product_(C[0], A[0], B[0], beta)
        return C
    # By symmetry the lower half suffices: 5/8 of the operations in four panels of columns. (Eight panels, or panels of up to 32
    # columns, measured slower.)
    width = -(-p // 4)
    for start in range(0, p, width):
        end = start + width
        C[start:, start:end].addmm_(A[start:], B[:, start:end], beta=beta)
        C[start:end, end:] = C[end:, start:end].mT
    return C


def sym(A: Tensor) -> Tensor:
    """(A + Aᵀ)/2."""
    return (A + A.mT) / 2


def eye_like(A: Tensor) -> Tensor:
    """The identity with the last dimension, dtype and device of A, shape (p, p)."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def row_chunks(Y: Tensor) -> list[slice]:
    """Blocks of rows of one large matrix, small enough for a CPU's cache, or for temporary tensors of 64 MB on a GPU."""
    if Y.ndim > 2 or Y.is_meta or torch.compiler.is_compiling():
        return [slice(0, Y.shape[-2])]
    n, p = Y.shape
    rows = max(256, (_GPU_BLOCK_ENTRIES if Y.is_cuda else _BLOCK_ENTRIES) // p)
    return [slice(start, min(start + rows, n)) for start in range(0, max(1, n), rows)]


def gram_in_double(Y: Tensor) -> Tensor:
    """YᵀY in float64, (..., n, p) to (..., p, p), one block of rows at a time."""
    G = torch.zeros(*Y.shape[:-2], Y.shape[-1], Y.shape[-1], dtype=torch.float64, device=Y.device)
    for rows in row_chunks(Y):
        part = Y[..., rows, :].double()
        G += part.mT @ part
    return G
