"""Other libraries' ways to an orthonormal weight."""

import importlib
import warnings
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from benchmarks._harness import Unavailable
from benchmarks._limits import refuse_low_precision, refuse_slow, refuse_square


class Weight(nn.Module):
    """A module with nothing but a weight, of any number of dimensions; its copy of ``weight`` may be constrained."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def load(module: str, package: str) -> Any:
    """The imported module; Unavailable where the package is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a library warns of while it is imported is not ours to mend
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"not installed: pip install {package}") from error


def torch_orthogonal(weight: Tensor, map: str | None = None) -> nn.Module:
    """PyTorch's own parametrization; None is its default, Householder's map for tall weights."""
    refuse_low_precision(weight.dtype)
    refuse_square(weight)
    n, p = weight.shape[-2:]
    if map == "householder" or (map is None and n != p):
        # Its backward goes over an n x n matrix for each of the p columns: some 400 operations an element at the rate of
        # products, timed on a CPU.
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
    # torch differentiates the exponential by that of a 2n x 2n matrix. Timed on a CPU, each is worth some 16 products.
    n, batch = weight.shape[-2], weight[..., 0, 0].numel()
    refuse_slow(batch * 16 * (2 * n**3 + 2 * (2 * n) ** 3), weight)
