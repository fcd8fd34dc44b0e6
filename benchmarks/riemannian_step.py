"""Time and extra memory of one optimizer step of an orthonormal matrix X (V x d), from a given gradient.

    python -m benchmarks.riemannian_step --rows "V=32000 d=512" --rounds 20

The reference is `floor`: PyTorch's time for four products of 2Vd² operations, the minimum for a Riemannian gradient and one
retraction, plus torch.optim.Adam on a free parameter of the same shape. Parametrizations are timed as a forward of the weight,
a backward to the stored tensor and a step of torch.optim.Adam.

"medium" is torch.set_float32_matmul_precision("medium") during the step: TF32 products on a GPU, bfloat16 products on a CPU
that supports them. In our step it applies to the two products that project the gradient, but not to the point or its Gram
matrix.

All steps have the same length: optimizers that divide by one number per matrix instead of one per entry get √(Vd) times the
rate. The defect is ‖XᵀX - I‖_F / √d after the timed steps, the largest one in a batch. Extra memory is the peak of the second
step besides parameter, gradients and optimizer state, each measured in a separate process.

"CUDA graph" is the time of the kernels alone, replayed without the host, with one gradient. POGO's check for a gradient of
zeros, which reads the device and cannot be captured, is left out there.

Muon keeps X on no manifold, so its defect grows: its row is the price of an orthogonalized direction. Spel orthogonalizes the
direction and the point, as our RiemannianMuon. Both peers iterate in low precision, torch's Muon in bfloat16 and Spel, by
default, at "medium"; "highest" is Spel with float32 products.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from unittest.mock import patch

import geoopt
import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Graphed, Row, Step, Unavailable, significant
from benchmarks._limits import LIMIT, refuse_low_precision
from benchmarks._peers import geotorch_orthogonal, load, torch_orthogonal
from manifold_tying.optim import RiemannianAdam, RiemannianMuon

TITLE = "One optimizer step of an orthonormal matrix"
SIZES = (
    (8192, 256),
    (32000, 512),
    (32000, 1024),
    (151936, 1024),
    (4096, 1024),
    (1024, 1024),
    (2048, 2048),
    (64, 256, 64),
)
QUICK_SIZES = ((96, 8), (16, 16), (4, 16, 4))
SMALL_SIZES = ((8, 4), (64, 16), (256, 32))
MANY_SHAPES = tuple((8 + 4 * i, min(8 + 4 * i, 4 + i % 29)) for i in range(60))
GRADIENTS = 4  # different gradients, used in turn


@dataclass
class Optimizing:
    """Steps of the optimizers; each parameter has its own gradients."""

    optimizers: Sequence[torch.optim.Optimizer]
    parameters: Sequence[Tensor]
    gradients: Iterable[Sequence[Tensor]]
    precision: Literal["highest", "medium"] = "highest"

    def __post_init__(self) -> None:
        self.turns = itertools.cycle(zip(*self.gradients, strict=True))

    def __call__(self) -> None:
        for parameter, gradient in zip(self.parameters, next(self.turns), strict=True):
            parameter.grad = gradient
        torch.set_float32_matmul_precision(self.precision)
        for optimizer in self.optimizers:
            optimizer.step()
        torch.set_float32_matmul_precision("highest")

    def defect(self) -> float:
        return max(float(mt.linalg.defect(parameter.detach()).max()) for parameter in self.parameters)


class Problem:
    """A point and gradients of one shape, created on first use."""

    def __init__(self, shape: tuple[int, ...], options: Options) -> None:
        self.shape = shape
        self.options, self.dtype = options, options.torch_dtype
        self.device = torch.device(options.device)
        self.rate = 0.1 / shape[-2] ** 0.5  # a tenth of a typical entry of X
        self.matrix_rate = self.rate * (shape[-2] * shape[-1]) ** 0.5

    @cached_property
    def point(self) -> Tensor:
        return mt.linalg.orthonormalize(self.options.normal(0, *self.shape)).to(self.dtype)

    @cached_property
    def gradients(self) -> list[Tensor]:
        return [self.options.normal(1 + k, *self.shape).to(self.dtype) for k in range(GRADIENTS)]

    def floor(self, fused: Literal[True] | None = None) -> Step:
        X, (n, p) = self.point, self.shape[-2:]
        parameter = nn.Parameter(X.clone())
        optimizer = torch.optim.Adam([parameter], lr=self.rate, fused=fused)
        small, large = X.new_empty(*self.shape[:-2], p, p), X.new_empty(*self.shape[:-2], n, p)
        turns = itertools.cycle(self.gradients)

        def step() -> None:
            gradient = next(turns)
            for _ in range(2):
                torch.matmul(X.mT, gradient, out=small)
                torch.matmul(X, small, out=large)
            parameter.grad = gradient
            optimizer.step()

        return step

    def ours(self, project_every: int = 1, precision: Literal["highest", "medium"] = "highest") -> Step:
        points = [self._on_stiefel(self.point)]
        return Optimizing([self._riemannian_adam(points, project_every)], points, [self.gradients], precision)

    def ours_many(self, loop: bool) -> Step:
        """One parameter for each matrix of the batch, with one optimizer for all or one for each."""
        points = [self._on_stiefel(X) for X in self.point]
        owned = [[X] for X in points] if loop else [points]
        return Optimizing([self._riemannian_adam(own) for own in owned], points, zip(*self.gradients, strict=True))

    def _riemannian_adam(self, points: list[Tensor], project_every: int = 1) -> RiemannianAdam:
        fused = True if self.device.type == "cuda" else None  # avoids syncs on a GPU
        return RiemannianAdam(points, self.rate, project_every=project_every, fused=fused)

    def _on_stiefel(self, X: Tensor) -> Tensor:
        if self.dtype == torch.bfloat16:
            raise Unavailable("keeps points in float32 or wider")
        point: Any = nn.Parameter(X.clone())
        point.manifold = mt.Stiefel()
        return point

    def geoopt(self, precision: Literal["highest", "medium"] = "highest") -> Step:
        refuse_low_precision(self.dtype)
        X = geoopt.ManifoldParameter(self.point.clone(), manifold=geoopt.EuclideanStiefel())
        return Optimizing([geoopt.optim.RiemannianAdam([X], lr=self.matrix_rate)], [X], [self.gradients], precision)

    def pogo(self) -> Step:
        """POGO with vector Adam, as in its README; rows=False for orthonormal columns. It requires a batch dimension."""
        pogo, base = load("pogo", "pogo-torch"), load("pogo.base", "pogo-torch")
        batch = [tensor.reshape(-1, *self.shape[-2:]) for tensor in (self.point, *self.gradients)]
        X = nn.Parameter(batch[0].clone())
        return Optimizing([pogo.POGO([X], base.VectorAdam(), self.matrix_rate, rows=False)], [X], [batch[1:]])

    def graphed(self, build: Callable[[], Step]) -> Step:
        if self.device.type != "cuda":
            raise Unavailable("is for device cuda")
        with patch.object(torch, "allclose", return_value=False):  # POGO's check
            return Graphed(build())

    def torch_muon(self) -> Step:
        if not hasattr(torch.optim, "Muon"):
            raise Unavailable(f"torch {torch.__version__} has no Muon")
        return self._of_a_matrix(
            torch.optim.Muon, self.rate / 0.2, adjust_lr_fn="match_rms_adamw"
        )  # length 0.2 lr √(Vd)

    def emerging_muon(self) -> Step:
        return self._of_a_matrix(self._emerging().Muon, self.rate)

    def our_muon(self, dual_steps: int = 0, precision: Literal["highest", "medium"] = "highest") -> Step:
        point = self._on_stiefel(self.point)
        optimizer = RiemannianMuon([point], lr=self.rate * self.shape[-2] ** 0.5, dual_steps=dual_steps)
        return Optimizing([optimizer], [point], [self.gradients], precision)

    def emerging_spel(self, precision: Literal["highest", "medium"] = "medium") -> Step:
        rate = self.rate * self.shape[-2] ** 0.5
        return self._of_a_matrix(self._emerging().Spel, rate, fp32_matmul_prec=precision)

    def _emerging(self) -> Any:
        return load(
            "emerging_optimizers.orthogonalized_optimizers",
            "absl-py git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers",
        )

    def _of_a_matrix(self, optimizer: Callable[..., torch.optim.Optimizer], rate: float, **options: Any) -> Step:
        if len(self.shape) != 2:
            raise Unavailable("takes no batch of matrices")
        X = nn.Parameter(self.point.clone())
        return Optimizing([optimizer([X], lr=rate, weight_decay=0.0, **options)], [X], [self.gradients])

    def through(self, parametrized: Callable[[Tensor], nn.Module]) -> Step:
        """Adam on the stored tensor of the weight."""
        module = parametrized(self.point)
        optimizer = torch.optim.Adam(module.parameters(), lr=self.rate)
        turns = itertools.cycle(self.gradients)

        def step() -> None:
            optimizer.zero_grad()
            weight: Any = module.weight
            weight.backward(next(turns))
            optimizer.step()

        return step

    def defects(self, steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        points = {name: step for name, step in steps.items() if isinstance(step, Optimizing)}
        return {"defect": {name: significant(step.defect()) for name, step in points.items()}}


def rows(options: Options) -> Iterator[Row]:
    """A row for each size; small points, whose time depends on the number of operations, only against geoopt."""
    for shape in QUICK_SIZES if options.quick else SIZES:
        yield _row(Problem(shape, options))
    for shape in SMALL_SIZES:
        yield _small_row(f"V={shape[0]} d={shape[1]}", [Problem(shape, options)])
    shapes = MANY_SHAPES[::20] if options.quick else MANY_SHAPES
    yield _small_row(f"{len(shapes)} shapes", [Problem(shape, options) for shape in shapes])


def _small_row(label: str, problems: Sequence[Problem]) -> Row:
    def ours() -> Step:
        points = [problem._on_stiefel(problem.point) for problem in problems]
        return Optimizing([problems[0]._riemannian_adam(points)], points, [problem.gradients for problem in problems])

    def peer() -> Step:
        points = [
            geoopt.ManifoldParameter(problem.point.clone(), manifold=geoopt.EuclideanStiefel()) for problem in problems
        ]
        optimizer = geoopt.optim.RiemannianAdam(points, lr=problems[0].matrix_rate)
        return Optimizing([optimizer], points, [problem.gradients for problem in problems])

    return Row(label, "geoopt", [Contender("ours", ours), Contender("geoopt", peer)], problems[0].defects)


def _row(problem: Problem) -> Row:
    *batch, n, p = problem.shape
    contenders = [
        Contender("floor", problem.floor),
        Contender("floor (fused Adam)", lambda: problem.floor(True)),
        Contender("ours", problem.ours),
        Contender(
            "ours, project_every=8", lambda: problem.ours(8), steps=8
        ),  # one of eight steps projects the gradient
        Contender("ours, medium", lambda: problem.ours(precision="medium")),
        Contender("ours, CUDA graph", lambda: problem.graphed(problem.ours)),
    ]
    if batch:
        contenders += [
            Contender(f"ours, {batch[0]} parameters", lambda: problem.ours_many(False)),
            Contender("ours, Python loop", lambda: problem.ours_many(True)),
        ]
    contenders += [
        Contender("our Muon", problem.our_muon, limit=LIMIT),
        Contender("our Muon, medium", lambda: problem.our_muon(precision="medium"), limit=LIMIT),
        Contender("our Muon, dual_steps=4", lambda: problem.our_muon(4), limit=LIMIT),
        Contender("geoopt", problem.geoopt, limit=LIMIT),
        Contender("geoopt, medium", lambda: problem.geoopt("medium"), limit=LIMIT),
        Contender("torch orthogonal", lambda: problem.through(torch_orthogonal), limit=LIMIT),
        Contender("geotorch", lambda: problem.through(geotorch_orthogonal), limit=LIMIT),
        Contender("POGO", problem.pogo, limit=LIMIT),
        Contender("POGO, CUDA graph", lambda: problem.graphed(problem.pogo), limit=LIMIT),
        Contender("torch Muon", problem.torch_muon, limit=LIMIT),
        Contender("Emerging-Optimizers Muon", problem.emerging_muon, limit=LIMIT),
        Contender("Emerging-Optimizers Spel", problem.emerging_spel, limit=LIMIT),
        Contender("Emerging-Optimizers Spel, highest", lambda: problem.emerging_spel("highest"), limit=LIMIT),
    ]
    label = f"{batch[0]} x ({n} x {p})" if batch else f"V={n} d={p}"
    return Row(label, "floor", contenders, problem.defects)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("riemannian_step", TITLE, rows(options), options, arguments, memory=True)


if __name__ == "__main__":
    main()
