"""What compiled code needs of every autograd.Function; that it computes the same is tested beside what is compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manifold_tying import PIT, TransposeTying, linalg
from manifold_tying.parametrizations import equivalence, orthogonal, spd


def tall_layer() -> nn.Linear:
    return nn.Linear(5, 9)


def pit() -> PIT:
    return PIT(12, 4, memory="trainable")


FORWARDS: dict[str, Callable[[], Tensor]] = {
    "cayley-neumann": lambda: linalg.cayley_neumann(torch.zeros(4, 4, requires_grad=True)),
    "tall cayley": lambda: orthogonal(tall_layer(), map="cayley").weight,
    "square cayley": lambda: orthogonal(nn.Linear(5, 5), map="cayley").weight,
    "spd": lambda: spd(nn.Linear(5, 5), "weight").weight,
    "equivalence, input-centric": lambda: equivalence(nn.Linear(64, 64), block_size=8)(torch.randn(3, 64)),
    "equivalence, weight-centric": lambda: equivalence(nn.Linear(8, 8), block_size=8)(torch.randn(300, 8)),
    "equivalence, weight": lambda: equivalence(nn.Linear(8, 8), block_size=4).weight,
    "loss": lambda: TransposeTying(12, 4).loss(torch.randn(30, 4), torch.randint(12, (30,))),
    "embed": lambda: pit().embed(torch.randint(12, (30,))),
    "readout": lambda: pit().logits(torch.randn(30, 4)),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_returns_nothing_that_it_changed_in_place(forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.11 compiles such a forward to one with a gradient of zeros; newer ones do not, and so would not show it.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    result = FORWARDS[forward]()
    assert result.requires_grad and result._version == 0
