"""Other libraries: orthonormal weights, and POET's official code."""

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from benchmarks._harness import Unavailable
from benchmarks._limits import refuse_low_precision, refuse_slow, refuse_square


class Weight(nn.Module):
    """A module with only a weight, of any number of dimensions, initialized from a copy of ``weight``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def load(module: str, package: str) -> Any:
    """Import the module; raises Unavailable if the package is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # we cannot fix a library's import warnings
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"not installed: pip install {package}") from error


def official_poet(block_size: int, *dimensions: int, device: str) -> Any:
    """The package of POET's authors; raises Unavailable if it lacks what it needs for layers of these dimensions."""
    poet = load("poet_torch", "git+https://github.com/Sphere-AI-Lab/poet")
    if device == "cpu" and find_spec("triton"):  # without Triton it uses PyTorch's operations
        raise Unavailable("its Triton kernels need CUDA")
    if any(dimension % block_size for dimension in dimensions):
        raise Unavailable("takes only dimensions that the block size divides")
    return poet


def torch_orthogonal(weight: Tensor, map: str | None = None) -> nn.Module:
    """PyTorch's parametrization; None is its default, Householder's map for tall weights."""
    refuse_low_precision(weight.dtype)
    refuse_square(weight)
    n, p = weight.shape[-2:]
    if map == "householder" or (map is None and n != p):
        # Its backward processes an n x n matrix for each of the p columns. Timed on a CPU, this takes as long as about 400
        # matmul operations per element.
        refuse_slow(weight[..., 0, 0].numel() * 400 * p * n**2, weight)
    elif map != "cayley":
        _refuse_slow_exponential(weight)
    return orthogonal(Weight(weight), orthogonal_map=map)


def geotorch_orthogonal(weight: Tensor) -> nn.Module:
    """geotorch.orthogonal: the exponential of an n x n skew matrix."""
    geotorch = load("geotorch", "geotorch")
    refuse_low_precision(weight.dtype)
    refuse_square(weight)
    _refuse_slow_exponential(weight)
    return geotorch.orthogonal(Weight(weight), "weight")


def _refuse_slow_exponential(weight: Tensor) -> None:
    # torch differentiates the exponential with that of a 2n x 2n matrix. Timed on a CPU, each takes as long as 16 matmuls.
    n, batch = weight.shape[-2], weight[..., 0, 0].numel()
    refuse_slow(batch * 16 * (2 * n**3 + 2 * (2 * n) ** 3), weight)
