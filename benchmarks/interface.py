"""Time and extra memory of a token interface, forward and backward: embedding lookup and loss.

    python -m benchmarks.interface --rows "V=32000 d=1024 N=2048" --rounds 10

A step is loss(h, targets) + Σ embed(ids) ⊙ C and its backward, for N hidden states h and a fixed cotangent C. Token ids and
targets follow Zipf's law, p ∝ 1 / (rank + 2.7), as words do. In bfloat16, hidden states are bfloat16 and everything runs under
autocast, with float32 parameters. The reference is transpose tying with this package's loss.

Extra memory is the memory of a step besides its inputs and results, measured in a separate process for each contender. At its
start the gradients of parameters and of h exist, left by the previous step; the step first drops them. The share is relative to
the bytes of all logits, N V, in the run's dtype. The gradient error is the relative error of the loss's gradient in h, compared
with full logits in float64, at the small size.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

import manifold_tying as mt
from benchmarks._command import Options, run
from benchmarks._harness import Contender, Extra, Row, Step, Unavailable, significant
from benchmarks._limits import LIMIT, refuse_large
from benchmarks._peers import load

TITLE = "A token interface: embedding lookup and loss, forward and backward"
CHECKED_SIZE = (4096, 256, 1024)
SIZES = (
    CHECKED_SIZE,
    *((V, d, N) for V in (32000, 151936) for d in (1024, 2048) for N in (2048, 8192, 16384)),
)
QUICK_SIZES = ((300, 16, 96),)
LARGEST_CHECKED = CHECKED_SIZE[0] * CHECKED_SIZE[2]  # largest number of logits in float64

Loss = Callable[[Tensor, Tensor], Tensor]
"""Hidden states (N, d) and targets (N,) to a scalar."""


class Passing:
    """Forward and backward through an interface, with a choice of loss function."""

    def __init__(self, problem: "Problem", interface: mt.TokenInterface, loss: Loss) -> None:
        self.problem, self.interface, self.loss = problem, interface, loss
        self.hidden = problem.hidden

    def __call__(self) -> Tensor:
        self.interface.zero_grad()
        self.hidden.grad = None
        with self.problem.options.autocast():
            loss = self.loss(self.hidden, self.problem.targets)
            embedded = self.interface.embed(self.problem.ids)
            total = loss + (embedded * self.problem.cotangent).sum()
        total.backward()
        return loss.detach()

    def gradient_error(self) -> float:
        """Relative error against full logits in float64, computed by independent code."""
        hidden = self.hidden.detach().double().requires_grad_()
        exact = copy.deepcopy(self.interface).double()
        (expected,) = torch.autograd.grad(F.cross_entropy(exact.logits(hidden), self.problem.targets), hidden)
        with self.problem.options.autocast():
            (found,) = torch.autograd.grad(self.loss(self.hidden, self.problem.targets), self.hidden)
        return float((found - expected).norm() / expected.norm())


class Problem:
    """Ids, targets and hidden states of one size, created on first use."""

    def __init__(self, V: int, d: int, N: int, options: Options) -> None:
        self.V, self.d, self.N = V, d, N
        self.options, self.dtype = options, options.torch_dtype
        self.device = torch.device(options.device)

    @cached_property
    def ids(self) -> Tensor:
        return self._zipf(0)

    @cached_property
    def targets(self) -> Tensor:
        return self._zipf(1)

    @cached_property
    def hidden(self) -> Tensor:
        return self.options.normal(2, self.N, self.d).to(self.dtype).requires_grad_()

    @cached_property
    def cotangent(self) -> Tensor:
        return self.options.normal(3, self.N, self.d).to(self.dtype)

    @cached_property
    def transpose(self) -> mt.TransposeTying:
        return self._here(mt.TransposeTying)  # shared by all loss functions

    def _zipf(self, seed: int) -> Tensor:
        p = 1 / (torch.arange(self.V) + 2.7)
        return torch.multinomial(p, self.N, True, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def _here(self, interface: Callable[..., Any], **options: Any) -> Any:
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(0)
            return interface(self.V, self.d, **options)

    def own(self, interface: Callable[..., Any], **options: Any) -> Step:
        """The interface with its own loss."""
        built = self.transpose if interface is mt.TransposeTying else self._here(interface, **options)
        return Passing(self, built, built.loss)

    def full_logits(self) -> Step:
        # The logits, their log-softmax and the gradients of both.
        refuse_large(4 * self.N * self.V * 4, self.device, "the logits, their log-softmax and gradients")
        table = self.transpose.weight
        return Passing(self, self.transpose, lambda h, targets: F.cross_entropy(F.linear(h, table), targets))

    def torch_chunked(self) -> Step:
        """PyTorch's chunked loss with its default chunks."""
        if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
        function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
        table = self.transpose.weight
        # Autocast does not cover this function.
        return Passing(
            self, self.transpose, lambda h, targets: function(h, table.to(h.dtype), targets, options=options)
        )

    def liger(self) -> Step:
        if self.device.type != "cuda":
            raise Unavailable("needs CUDA")
        function = load("liger_kernel.transformers", "liger-kernel").LigerFusedLinearCrossEntropyLoss()
        table = self.transpose.weight
        return Passing(self, self.transpose, lambda h, targets: function(table.to(h.dtype), h, targets))

    def values(self, steps: Mapping[str, Step], milliseconds: Mapping[str, float]) -> Extra:
        passing = {name: step for name, step in steps.items() if isinstance(step, Passing)}
        checked = passing if self.N * self.V <= LARGEST_CHECKED else {}
        return {
            "loss": {name: round(float(step()), 5) for name, step in passing.items()},
            "gradient error": {name: significant(step.gradient_error()) for name, step in checked.items()},
        }


def rows(options: Options) -> Iterator[Row]:
    """A row for each size."""
    return (_row(Problem(*size, options)) for size in (QUICK_SIZES if options.quick else SIZES))


def _row(problem: Problem) -> Row:
    contenders = [
        Contender("transpose", lambda: problem.own(mt.TransposeTying)),
        Contender("untied", lambda: problem.own(mt.Untied)),
        Contender("pit-frozen", lambda: problem.own(mt.PIT, memory="frozen")),
        Contender("pit-trainable", lambda: problem.own(mt.PIT, memory="trainable")),
        Contender("pit-free", lambda: problem.own(mt.PIT, memory="free")),
        Contender("transpose, F.cross_entropy on full logits", problem.full_logits, limit=LIMIT),
        Contender("transpose, torch linear_cross_entropy", problem.torch_chunked, limit=LIMIT),
        Contender("transpose, Liger", problem.liger, limit=LIMIT),
    ]
    label = f"V={problem.V} d={problem.d} N={problem.N}"
    logits = ("logits", problem.N * problem.V * problem.dtype.itemsize)
    return Row(label, "transpose", contenders, problem.values, memory_unit=logits)


def main(arguments: Sequence[str] | None = None) -> None:
    options = tyro.cli(Options, description=__doc__, args=arguments)
    run("interface", TITLE, rows(options), options, arguments, memory=True)


if __name__ == "__main__":
    main()
