"""Where a kernel may run."""

import functools
import warnings

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from manifold_tying import autograd
from manifold_tying.kernels._cross_entropy import cross_entropy_


def runs_eagerly_on_gpu(x: Tensor) -> bool:
    """Whether operations on x run on a CUDA device, at once, and nobody has to see them.

    torch.compile, torch.export, torch.jit.trace, torch.func and dispatch modes, such as FakeTensorMode and counters of
    operations, have to see PyTorch's own operations. Subclasses of Tensor hold their values elsewhere, or have none.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or autograd.in_transform():
        return False
    return type(x) in (Tensor, nn.Parameter) and _get_current_dispatch_mode() is None


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel may compute with x, which then is float32 or narrower: see :func:`runs_eagerly_on_gpu`.

    Elsewhere, and where Triton is not installed or cannot compile, PyTorch's own operations do the same work.
    """
    return runs_eagerly_on_gpu(x) and x.dtype != torch.float64 and _compiles(x.device)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Triton needs a C compiler and Python's headers at run time, which small container images lack.

    Before Ampere, GPUs have no bfloat16; AMD's have too little shared memory for the tiles.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        zeros = torch.zeros(1, 1, device=device)
        cross_entropy_(zeros, zeros[0].long(), zeros[0])
    except ModuleNotFoundError:
        return False
    except Exception as error:  # of the compiler, the driver or Triton: each its own
        warnings.warn(f"Triton cannot compile here; PyTorch's slower operations run instead: {error}", stacklevel=2)
        return False
    return True
