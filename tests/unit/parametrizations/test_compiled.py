"""What compiled code needs of a forward, and an interface with a layer by the default compiler.

That each part's graph computes the same is tested beside that part.
"""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import as_if_compiled, few_chunks
from machine import lacking
from torch import Tensor, nn

from manifold_tying import PIT, TransposeTying, equivalence, linalg, orthogonal, spd

V, D = 64, 8


def pit() -> PIT:
    return PIT(12, 4, memory="trainable")


FORWARDS: dict[str, Callable[[], Tensor]] = {
    "cayley-neumann": lambda: linalg.cayley_neumann(torch.zeros(4, 4, requires_grad=True)),
    "tall cayley": lambda: orthogonal(nn.Linear(5, 9), map="cayley").weight,
    "square cayley": lambda: orthogonal(nn.Linear(5, 5), map="cayley").weight,
    "spd": lambda: spd(nn.Linear(5, 5), "weight").weight,
    "equivalence, input-centric": lambda: equivalence(nn.Linear(64, 64), block_size=8, terms=2)(torch.randn(3, 64)),
    "equivalence, weight-centric": lambda: equivalence(nn.Linear(8, 8), block_size=8)(torch.randn(300, 8)),
    "equivalence, weight": lambda: equivalence(nn.Linear(8, 8), block_size=4).weight,
    "loss": lambda: TransposeTying(12, 4).loss(torch.randn(30, 4), torch.randint(12, (30,))),
    "embed": lambda: pit().embed(torch.randint(12, (30,))),
    "readout": lambda: pit().logits(torch.randn(30, 4)),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_returns_nothing_that_it_changed_in_place(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.11 compiles such a forward to one with a gradient of zeros; newer ones do not, and so would not show it.
    as_if_compiled(monkeypatch)
    result = FORWARDS[forward]()
    assert result.requires_grad and result._version == 0


class _Layout(torch.autograd.Function):
    """The identity, which notes how the gradient that reaches it lies in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: list[tuple[int, ...]]) -> Tensor:
        ctx.strides = strides
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.strides.append(grad.stride())
        return grad, None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "embed": lambda x: PIT(12, 8, memory="trainable").embed(torch.randint(12, (len(x),))),
    "embed, free": lambda x: PIT(12, 8).embed(torch.randint(12, (len(x),))),
    "readout": lambda x: PIT(12, 8, memory="frozen").logits(x),
    "loss": lambda x: PIT(12, 8, memory="trainable").loss(x, torch.randint(12, (len(x),))),
    "orthogonal": lambda x: orthogonal(nn.Linear(8, 9))(x),
    "equivalence, block": lambda x: equivalence(nn.Linear(8, 12), block_size=4, terms=2)(x),
    "equivalence, full": lambda x: equivalence(nn.Linear(8, 12), scheme="full", block_size=4)(x),
    "equivalence, exact": lambda x: equivalence(nn.Linear(8, 12), block_size=4, terms=None)(x),
}


@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("forward", ACTIVATIONS)
def test_activations_and_their_gradients_lie_row_by_row(
    forward: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled by torch 2.13 for a CPU, a norm of what lies column by column is wrong.
    as_if_compiled(monkeypatch)
    x = torch.randn(tokens, 8, requires_grad=True)
    strides: list[tuple[int, ...]] = []
    y = ACTIVATIONS[forward](_Layout.apply(x, strides))
    assert y.is_contiguous()
    y.square().sum().backward()
    assert strides == ([] if forward.startswith("embed") else [(8, 1)])


# torch's own, where it generates code
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*_prims_common.check. is deprecated:FutureWarning")
@pytest.mark.slow
def test_an_interface_and_a_layer_by_the_default_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        lacking("no C++ compiler here, which torch.compile needs; apt-get update && apt-get install -y g++")
    few_chunks(monkeypatch)
    torch._dynamo.reset()
    interface = PIT(V, D, memory="trainable")
    layer = equivalence(nn.Linear(D, D), block_size=4)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        x = nn.functional.rms_norm(interface.embed(ids), (D,))
        return interface.loss(x + layer(nn.functional.rms_norm(x, (D,))), targets)

    ids = torch.randint(V, (3, 4))  # more tokens than columns
    gradients = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        interface.zero_grad()
        layer.zero_grad()
        # In bfloat16 the compiler fuses more, a copy into rows with the norm after it, say.
        with torch.autocast("cpu", torch.bfloat16):
            run(ids[:, :-1], ids[:, 1:]).backward()
        gradients.append([p.grad for part in (interface, layer) for p in part.parameters() if p.requires_grad])
    for eager, compiled in zip(*gradients, strict=True):
        assert eager is not None and compiled is not None
        assert (compiled - eager).norm() <= 5e-2 * eager.norm()
