"""The models, data and points that many processes and one are compared by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.models import Llama, LlamaConfig
from manifold_tying.optim import MergeSchedule, RiemannianAdam, RiemannianMuon, RiemannianSGD, param_groups

PROCESSES = 4
STEPS, FEW, MERGE_EVERY = 8, 5, 3
RATE = 2e-2
V, D = 49, 16  # 13, 13, 13 and 10 rows on four processes
CONFIG = LlamaConfig(vocab_size=V, hidden_size=D, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=24)
ARMS = ("untied", "transpose", "pit-frozen", "pit-trainable", "pit-free", "poet")
SOME = (2, 4)  # even and uneven shards, and none at all
# Sizes of the groups: every way of sharing what an arm has once, and all of them of one arm and of what is merged. There is no
# ("poet", "vocabulary"): its interface is that of untied.
RUNS: dict[tuple[str, str], tuple[int, ...]] = {
    **{(arm, "fsdp"): (3,) for arm in ARMS},
    **{(arm, "vocabulary"): (3,) for arm in ARMS if arm != "poet"},
    **{(arm, "ddp"): (2,) for arm in ARMS},
    ("pit-trainable", "fsdp"): (1, 2, 3, 4),
    ("pit-trainable", "vocabulary"): (4,),
    ("poet", "fsdp"): (2, 4),
    ("poet", "ddp"): (3,),
}
SHAPES = ((9, 4), (37, 12), (150, 130))  # on four processes: 3, 3, 3, 0; uneven; wide enough for every path of products
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "element": lambda params: RiemannianAdam(params, lr=0.05),
    "every-other": lambda params: RiemannianAdam(params, lr=0.05, project_every=2),
    "row": lambda params: RiemannianAdam(params, lr=0.05, second_moment="row"),
    "matrix": lambda params: RiemannianAdam(params, lr=0.05, second_moment="matrix", maximize=True),
    "far": lambda params: RiemannianSGD(params, lr=300.0),
    "muon": lambda params: RiemannianMuon(params, lr=0.05, dual_steps=1),
}


def steps_of(layout: str) -> int:
    """All of them where parameters are whole or sharded; of tables split by vocabulary a dozen small all-reduces per loss."""
    return FEW if layout in ("vocabulary", "checkpointed") else STEPS


def build(arm: str) -> Llama:
    """A model, the same in every process."""
    torch.manual_seed(1)
    makers: dict[str, Callable[[], mt.TokenInterface]] = {
        "transpose": lambda: mt.TransposeTying(V, D),
        "pit-free": lambda: mt.PIT(V, D, std=0.3),
        "pit-trainable": lambda: mt.PIT(V, D, memory="trainable"),
        "pit-frozen": lambda: mt.PIT(V, D, memory="frozen"),
    }
    model = Llama(CONFIG, makers.get(arm, lambda: mt.Untied(V, D))())
    if arm == "poet":
        mt.equivalence_(model, block_size=5, seed=3, verbose=False)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Twelve sequences of six tokens, which 1, 2, 3 and 4 processes can share, and the tokens after."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(V, (12, 1), generator=generator)
    sequences = (starts + 3 * torch.arange(7)) % V
    return sequences[:, :-1], sequences[:, 1:]


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
    share: Callable[[Tensor], Tensor] = lambda whole: whole,
    steps: range = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Losses over the steps."""
    optimizer = optimizer or RiemannianAdam(param_groups(model), lr=RATE)
    rotates = any(part.endswith("merges") for part, _ in model.named_buffers())
    clock = MergeSchedule(model, optimizer, every=MERGE_EVERY) if rotates else None
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(*(share(part) for part in batch(step)))
        loss.backward()
        optimizer.step()
        if clock is not None:
            clock.step()
        losses.append(mean(loss.detach()).item())
    return losses


def points(shape: tuple[int, int]) -> list[Tensor]:
    """Two points of one shape, so that they are moved as one stack."""
    torch.manual_seed(2)
    return [mt.Stiefel().random(*shape).detach().as_subclass(Tensor) for _ in range(2)]


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


def move(points: list[Tensor], kind: str, distribute: Callable[[Tensor], Tensor] = lambda X: X) -> list[Tensor]:
    """The points after three steps."""
    params = [nn.Parameter(distribute(X.clone())) for X in points]
    optimizer = KINDS[kind]([{"params": params, "manifold": mt.Stiefel()}])
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = distribute(gradient(p.shape, 2 * step + i))
        optimizer.step()
    return [p.detach() for p in params]
