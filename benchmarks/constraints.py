"""Time of constrained weights and their steps: doubly stochastic batches, layers of low rank, points on spheres.

    python -m benchmarks.constraints --rounds 20

Sinkhorn: forward and backward of a batch of standard normal matrices. The reference is 20 rounds of Sinkhorn on logarithms,
compiled. "off" is the largest deviation of a sum of a row or column from 1. Low rank: forward and backward of a linear layer of
a quarter of the full rank, to its input and weights. Spheres: an optimizer step of 12 weights whose rows, columns or matrices
have norm 1, beside torch's AdamW on plain weights of that shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Row, Step
from manifold_tying.manifolds import Of
from manifold_tying.optim import RiemannianAdam, param_groups

TITLE = "Doubly stochastic, low-rank and spherical weights"
BATCHES, RANKED, TOKENS, SQUARES = ((8192, 4, 4), (8192, 16, 16), (512, 512)), 2048, 2048, (512, 1024)
QUICK_BATCHES = ((8, 4, 4), (20, 20))
LAYERS = 12


class Backward:
    """Forward and backward of a function at M."""

    def __init__(self, function: Callable[[Tensor], Tensor], M: Tensor, cotangent: Tensor) -> None:
        self.function, self.M, self.cotangent = function, M.clone().requires_grad_(), cotangent

    def __call__(self) -> Tensor:
        self.M.grad = None
        result = self.function(self.M)
        result.backward(self.cotangent)
        return result


def twenty_rounds(M: Tensor) -> Tensor:
    """Sinkhorn's rounds on logarithms, a fixed number as in hyper-connections (Xie et al. 2025, arXiv:2512.24880)."""
    for _ in range(20):
        M = M - M.logsumexp(-1, keepdim=True)
        M = M - M.logsumexp(-2, keepdim=True)
    return M.exp()


def sinkhorn_row(shape: tuple[int, ...], options: Options) -> Row:
    M, G = (options.normal(seed, *shape).to(options.torch_dtype) for seed in (0, 1))

    def build(function: Callable[[Tensor], Tensor], compiled: bool) -> Step:
        return Backward(torch.compile(function, dynamic=False) if compiled else function, M, G)

    def deviations(steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        found = {name: step().detach().double() for name, step in steps.items() if isinstance(step, Backward)}
        return {"off": {name: float(max((P.sum(d) - 1).abs().max() for d in (-1, -2))) for name, P in found.items()}}

    reference = "20 rounds, compiled"
    contenders = [
        Contender(reference, partial(build, twenty_rounds, True)),
        Contender("20 rounds", partial(build, twenty_rounds, False)),
        Contender("ours", partial(build, mt.linalg.sinkhorn, False)),
        Contender("ours, compiled", partial(build, mt.linalg.sinkhorn, True)),
        Contender("orthostochastic", partial(build, mt.linalg.orthostochastic, False)),
    ]
    return Row(f"sinkhorn {' x '.join(map(str, shape))}", reference, contenders, deviations)


def low_rank_row(d: int, tokens: int, options: Options) -> Row:
    x, G = (options.normal(seed, tokens, d).to(options.torch_dtype) for seed in (0, 1))

    def build(constrained: bool) -> Step:
        layer = nn.Linear(d, d, bias=False, device=options.device)
        if constrained:
            mt.low_rank(layer, rank=d // 4)
        layer.to(options.torch_dtype)
        step = Backward(layer, x, G)

        def backward() -> None:
            layer.zero_grad()
            step()

        return backward

    contenders = [Contender("plain", partial(build, False)), Contender("ours", partial(build, True))]
    return Row(f"low_rank d={d}, rank d/4, {tokens} tokens", "plain", contenders)


def sphere_row(of: Of, d: int, options: Options) -> Row:
    def build(constrained: bool) -> Step:
        layers = nn.ModuleList(nn.Linear(d, d, bias=False, device=options.device) for _ in range(LAYERS))
        if constrained:
            for layer in layers:
                mt.sphere(layer, of=of, radius=1.0)
        optimizer = RiemannianAdam(param_groups(layers)) if constrained else torch.optim.AdamW(layers.parameters())
        for seed, p in enumerate(layers.parameters()):
            p.grad = options.normal(seed, d, d)
        return optimizer.step

    contenders = [Contender("plain", partial(build, False)), Contender("ours", partial(build, True))]
    return Row(f"sphere of {of}, {LAYERS} of {d} x {d}", "plain", contenders)


def rows(options: Options) -> Iterator[Row]:
    """Sinkhorn's shapes, low rank, and spheres."""
    for shape in QUICK_BATCHES if options.quick else BATCHES:
        yield sinkhorn_row(shape, options)
    yield low_rank_row(32, 16, options) if options.quick else low_rank_row(RANKED, TOKENS, options)
    for d in (8,) if options.quick else SQUARES:
        for of in ("rows", "columns", "matrix"):
            yield sphere_row(of, d, options)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("constraints", TITLE, rows(options), options, arguments)


if __name__ == "__main__":
    main()
