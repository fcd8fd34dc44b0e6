"""Time and extra memory of a linear layer under orthogonal equivalence (POET), forward and backward.

    python -m benchmarks.equivalence --rows "2048x2048 b=256 N=2048" --rounds 10

A step is y = layer(x) and the backward of a fixed cotangent, for N tokens. It also computes the gradient of x, as inside a
model, and first drops the gradients of the previous step. The skew vectors are nonzero, as in training. In bfloat16, x is
bfloat16 and everything runs under autocast, with float32 parameters. The reference is nn.Linear.

On a CPU a layer picks the cheaper of two formulations, by activations or by weight; both are also timed separately. On a GPU
it goes by activations, and the time depends on the host, which launches the kernels. "CUDA graph" is the time of the kernels
alone, replayed without the host; their extra memory is not measured.

R and P are two terms of the Neumann series, except in "exact Cayley", which is the default of `equivalence`.

The official POET code compiles its layer itself; its series has four terms.

The last measure is the number of operations of the products with tokens and weight, forward and backward, divided by
nn.Linear's 6Nmn. It does not count the maps from skew vectors to orthogonal blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import tyro
from torch import Tensor, nn

import manifold_tying as mt
from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Graphed, Row, Step, Unavailable, significant
from benchmarks._limits import LIMIT
from benchmarks._peers import load, official_poet
from manifold_tying.poet.linear import linear_flops, poet_linear, prefers_input_centric

TITLE = "A linear layer with W = R W0 P, forward and backward"
SIZES = (
    (2048, 2048, 256, 2048),
    (2048, 2048, 256, 8192),
    (512, 512, 256, 2048),
    (512, 512, 64, 2048),
    (512, 512, 64, 8192),
    (1376, 512, 256, 2048),
    (2048, 2048, 64, 8192),
    (4096, 4096, 256, 2048),
    (4096, 4096, 256, 16384),
    (11008, 4096, 256, 2048),
    (4096, 11008, 256, 2048),
    (14336, 4096, 256, 2048),  # Llama 3 8B: mlp up and down projections, keys and values
    (4096, 14336, 256, 2048),
    (1024, 4096, 256, 2048),
)
QUICK_SIZES = ((24, 40, 8, 32),)
NOISE = 0.1  # approximate spectral norm of a block's skew matrix


class Layer:
    """A forward and backward of one layer."""

    def __init__(self, problem: "Problem", layer: nn.Module) -> None:
        self.problem, self.layer = problem, layer

    def __call__(self) -> None:
        self.layer.zero_grad()
        self.problem.x.grad = None
        with self.problem.options.autocast():
            y = self.layer(self.problem.x)
        y.backward(self.problem.cotangent.to(y.dtype))


class OneFormulation(nn.Module):
    """A layer under equivalence with a fixed formulation."""

    def __init__(self, layer: Any, input_centric: bool) -> None:
        super().__init__()
        self.layer, self.input_centric = layer, input_centric

    def forward(self, x: Tensor) -> Tensor:
        stored, part = self.layer.parametrizations.weight.original, self.layer.parametrizations.weight[0]
        places = part.out_places, part.in_places
        return poet_linear(x, part.ordered_base, stored, part.spec, places, input_centric=self.input_centric)


class Problem:
    """Tokens of one size, created on first use."""

    def __init__(self, m: int, n: int, b: int, N: int, options: Options) -> None:
        self.m, self.n, self.b, self.N = m, n, b, N
        self.options, self.dtype = options, options.torch_dtype
        self.device = torch.device(options.device)

    @cached_property
    def x(self) -> Tensor:
        return self.options.normal(0, self.N, self.n).to(self.dtype).requires_grad_()

    @cached_property
    def cotangent(self) -> Tensor:
        return self.options.normal(1, self.N, self.m).to(self.dtype)

    def linear(self) -> nn.Linear:
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(0)
            return nn.Linear(self.n, self.m, bias=False)

    def poet(
        self, input_centric: bool | None = None, compiled: bool = False, terms: int | None = 2, **options: Any
    ) -> Step:
        layer: nn.Module = mt.equivalence(self.linear(), seed=0, terms=terms, **options)
        with torch.no_grad():
            for stored in layer.parameters():
                # A b x b skew matrix with standard normal entries has a norm of about 2√b.
                stored.copy_(self.options.normal(2, stored.numel()) * (NOISE / (2 * self.b**0.5)))
        if compiled:
            return self.compiled(layer)
        return Layer(self, layer if input_centric is None else OneFormulation(layer, input_centric))

    def compiled(self, layer: nn.Module) -> Step:
        torch.compiler.reset()  # each size needs its own graph, and Dynamo gives up after eight
        return Layer(self, cast(nn.Module, torch.compile(layer, fullgraph=True)))

    def only_on(self, device: str, build: Callable[[], Step]) -> Callable[[], Step]:
        def checked() -> Step:
            if self.device.type != device:
                raise Unavailable(f"is for device {device}")
            return build()

        return checked

    def oft(self) -> Step:
        """PEFT's orthogonal finetuning: only P, which rotates the input block by block, without a permutation."""
        peft = load("peft", "peft")
        config = peft.OFTConfig(
            target_modules=["0"], oft_block_size=self.b, use_cayley_neumann=True, module_dropout=0.0
        )
        return Layer(self, peft.get_peft_model(nn.Sequential(self.linear()), config))

    def official(self) -> Step:
        """The layer of POET's authors, which compiles itself."""
        poet = official_poet(self.b, self.m, self.n, device=self.device.type)
        torch.compiler.reset()  # as for ours
        layer = poet.POETLinear(self.n, self.m, block_size=self.b, device=self.device)
        with torch.no_grad():
            layer.weight.copy_(self.linear().weight)
            skew = self.options.normal(2, *layer.oft_R.shape)
            layer.oft_R.copy_(skew * (NOISE / (2 * self.b**0.5)))
        step = Layer(self, layer)
        step()  # compiles, which takes longer than the limit of a step
        return step

    def operations(self, steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        counts = {
            name: significant(self._operations(step.layer) / (6 * self.N * self.m * self.n))
            for name, step in steps.items()
            if isinstance(step, Layer) and name.startswith("ours")
        }
        return {"operations / nn.Linear": {"nn.Linear": 1.0, **counts}}

    def _operations(self, layer: Any) -> int:
        if isinstance(layer, OneFormulation):
            spec, choice = layer.layer.parametrizations.weight[0].spec, layer.input_centric
        else:
            spec, low = layer.parametrizations.weight[0].spec, self.dtype == torch.bfloat16
            choice = self.device.type == "cuda" or prefers_input_centric(self.N, spec, low_precision=low)
        return linear_flops(self.N, spec, input_centric=choice)


def rows(options: Options) -> Iterator[Row]:
    """A row for each size."""
    return (_row(Problem(*size, options)) for size in (QUICK_SIZES if options.quick else SIZES))


def _row(problem: Problem) -> Row:
    ours: dict[str, Callable[[], Step]] = {
        "ours block": lambda: problem.poet(block_size=problem.b),
        "ours block, 4 terms": lambda: problem.poet(block_size=problem.b, terms=4),
        "ours block, exact Cayley": lambda: problem.poet(block_size=problem.b, terms=None),
        # P also gets R's parameters, so its blocks are as large as PEFT's below, minus one.
        "ours block, P alone": lambda: problem.poet(block_size=problem.b // 2, out_share=0.0),
        "ours full 1/2": lambda: problem.poet(scheme="full", fraction=0.5),
    }
    on_gpu: dict[str, Callable[[], Step]] = {
        "nn.Linear, CUDA graph": lambda: Graphed(Layer(problem, problem.linear())),
        "ours block, CUDA graph": lambda: Graphed(problem.poet(block_size=problem.b)),
        "PEFT OFT, CUDA graph": lambda: Graphed(problem.oft()),
        "nn.Linear, compiled": lambda: problem.compiled(problem.linear()),
        "ours block, compiled": lambda: problem.poet(compiled=True, block_size=problem.b),
    }
    on_cpu: dict[str, Callable[[], Step]] = {
        "ours block, by activations": lambda: problem.poet(True, block_size=problem.b),
        "ours block, by weight": lambda: problem.poet(False, block_size=problem.b),
    }
    ours |= {name: problem.only_on("cuda", build) for name, build in on_gpu.items()}
    ours |= {name: problem.only_on("cpu", build) for name, build in on_cpu.items()}
    contenders = [
        Contender("nn.Linear", lambda: Layer(problem, problem.linear())),
        *(Contender(name, build, limit=LIMIT) for name, build in ours.items()),
        Contender("PEFT OFT (P alone)", problem.oft, limit=LIMIT),
        Contender("official POET", problem.official, limit=LIMIT),
    ]
    label = f"{problem.m}x{problem.n} b={problem.b} N={problem.N}"
    weight = ("weight", problem.m * problem.n * 4)
    return Row(label, "nn.Linear", contenders, problem.operations, memory_unit=weight)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("equivalence", TITLE, rows(options), options, arguments, memory=True)


if __name__ == "__main__":
    main()
