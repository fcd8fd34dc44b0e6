"""Time of a constrained weight: forward from the stored tensor to the weight, and backward of a cotangent.

    python -m benchmarks.maps --rows 1024 --rounds 20

Each contender's stored tensor is its initial value plus 0.05/√n times a standard normal matrix, because maps may be easy to
compute at the initial value. The matrix has a zero diagonal, because PyTorch's Householder map needs the diagonal's signs. The
reference is PyTorch's Cayley map, or our polar map if PyTorch's n x n matrices would be too large.

The defect is ‖XᵀX - I‖_F / √p of the weight. The gradient error is the relative error of the stored tensor's gradient, compared
with float64, for our maps at the smaller sizes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Row, Step, significant
from benchmarks._limits import LARGEST_SQUARE, LIMIT
from benchmarks._peers import Weight, geotorch_orthogonal, torch_orthogonal
from manifold_tying.parametrizations import OrthogonalMap

TITLE = "An orthonormal weight from a free tensor, forward and backward"
SIZES = ((512, 512), (1024, 1024), (2048, 2048), (2048, 128), (32000, 256))
QUICK_SIZES = ((24, 24), (48, 8))
LARGEST_CHECKED = 512 * 512  # largest weight whose gradient is also computed in float64


class Mapped:
    """A perturbed constrained weight, and a backward through it."""

    def __init__(self, module: Any, noise: Tensor, cotangent: Tensor) -> None:
        self.module = module
        self.cotangent = cotangent
        self.stored: Tensor = module.parametrizations.weight.original
        with torch.no_grad():
            self.stored.add_(noise)

    def __call__(self) -> None:
        self.stored.grad = None
        self.module.weight.backward(self.cotangent)

    def defect(self) -> float:
        return float(mt.linalg.defect(self.module.weight.detach()))

    def gradient_error(self) -> float:
        exact: Any = copy.deepcopy(self.module).double()
        (expected,) = torch.autograd.grad(exact.weight, exact.parametrizations.weight.original, self.cotangent.double())
        self()
        assert self.stored.grad is not None
        return float((self.stored.grad - expected).norm() / expected.norm())


class Problem:
    """Weight, noise and cotangent of one shape, created on first use."""

    def __init__(self, shape: tuple[int, int], options: Options) -> None:
        self.shape = shape
        self.options, self.dtype = options, options.torch_dtype

    @cached_property
    def start(self) -> Tensor:
        return mt.linalg.orthonormalize(self.options.normal(0, *self.shape)).to(self.dtype)

    @cached_property
    def noise(self) -> Tensor:
        return (self.options.normal(1, *self.shape) * (0.05 / self.shape[0] ** 0.5)).fill_diagonal_(0)

    @cached_property
    def cotangent(self) -> Tensor:
        return self.options.normal(2, *self.shape).to(self.dtype)

    def through(self, parametrized: Callable[[Tensor], nn.Module]) -> Step:
        return Mapped(parametrized(self.start), self.noise, self.cotangent)

    def errors(self, steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        mapped = {name: step for name, step in steps.items() if isinstance(step, Mapped)}
        small = self.shape[0] * self.shape[1] <= LARGEST_CHECKED
        return {
            "defect": {name: significant(step.defect()) for name, step in mapped.items()},
            "gradient error": {
                name: significant(step.gradient_error())
                for name, step in mapped.items()
                if small and name.startswith("ours")
            },
        }


def rows(options: Options) -> Iterator[Row]:
    """A row for each size."""
    return (_row(Problem(shape, options)) for shape in (QUICK_SIZES if options.quick else SIZES))


def _row(problem: Problem) -> Row:
    n, p = problem.shape
    square = n * n * torch.float32.itemsize <= LARGEST_SQUARE
    reference = "torch cayley" if square else "ours polar"
    builders: dict[str, Callable[[Tensor], nn.Module]] = {
        **{f"ours {map}": _ours(map) for map in get_args(OrthogonalMap)},
        "torch matrix_exp": lambda X: torch_orthogonal(X, "matrix_exp"),
        "torch cayley": lambda X: torch_orthogonal(X, "cayley"),
        "torch householder": lambda X: torch_orthogonal(X, "householder"),
        "geotorch": geotorch_orthogonal,
    }
    contenders = [_contender(problem, name, build, name != reference) for name, build in builders.items()]
    return Row(f"{n} x {p}", reference, contenders, problem.errors)


def _contender(problem: Problem, name: str, build: Callable[[Tensor], nn.Module], limited: bool) -> Contender:
    # The reference has no limit, because every ratio needs its times.
    return Contender(name, lambda: problem.through(build), limit=LIMIT if limited else math.inf)


def _ours(map: OrthogonalMap) -> Callable[[Tensor], nn.Module]:
    return lambda X: mt.orthogonal(Weight(X), map=map)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("maps", TITLE, rows(options), options, arguments)


if __name__ == "__main__":
    main()
