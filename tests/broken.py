"""Manifolds, optimizers, parametrizations and interfaces that each break exactly one law."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import PIT, SPD, Stiefel, TransposeTying, linalg
from manifold_tying.testing import (
    assert_orthonormal,
    check_manifold,
    check_optimizer,
    check_parametrization,
    check_token_interface,
)

Check = Callable[[], None]

# ---- manifolds


def manifolds() -> Iterator[tuple[str, Check]]:
    """The law, and the check of a manifold that breaks it."""

    def variant(**methods: Any) -> Any:
        return type("Broken", (Stiefel,), methods)()

    def spoiled(law: str, options: dict[str, Any] | None = None, **methods: Any) -> tuple[str, Check]:
        return law, lambda: check_manifold(variant(**methods), (5, 2), **(options or {}))

    base = Stiefel()
    fixed = base.random(5, 2, dtype=torch.float64).as_subclass(Tensor)

    def oblique(self: Any, x: Tensor, u: Tensor) -> Tensor:
        above = linalg.symmetric(x.mT @ u).triu(1)
        return base.proju(x, u) + x @ (above - above.mT)

    def one_sided(*shape: int, **options: Any) -> Tensor:
        return linalg.orthonormalize(torch.randn(shape, **options).abs(), "qr")

    def turned(x: Tensor) -> Tensor:
        return x @ torch.linalg.matrix_exp(torch.tensor([[0.0, 1e-5], [-1e-5, 0.0]], dtype=x.dtype))

    def jumps(self: Any, x: Tensor, u: Tensor) -> Tensor:
        return x.flip(-1) if not u.any() and not u.requires_grad else base.retr(x, u)

    def no_expmap(self: Any, x: Tensor, u: Tensor) -> Tensor:
        raise NotImplementedError

    yield spoiled(
        "the checks reject what is off the manifold", _check_point_on_manifold=lambda self, x, **_: (True, None)
    )
    yield spoiled(
        "random points are on the manifold", random=lambda self, *shape, **o: fixed.expand(shape).to(o["dtype"]).clone()
    )
    yield spoiled(
        "random points are uniform", {"uniform": True}, random=lambda self, *shape, **o: one_sided(*shape, **o)
    )
    yield spoiled(
        "projx lands on the manifold",
        projx=lambda self, x: x if linalg.defect(x).max() < 1e-8 else (1 + 1e-9) * base.projx(x),
        random=lambda self, *shape, **o: base.random(*shape, **o),
    )
    yield spoiled("projx is idempotent", projx=lambda self, x: turned(base.projx(x)))
    yield spoiled("projx is the nearest point", projx=lambda self, x: linalg.orthonormalize(x, "qr"))
    yield spoiled("proju and egrad2rgrad give tangent vectors", egrad2rgrad=lambda self, x, u: u)
    yield spoiled("proju is orthogonal", proju=oblique)
    yield spoiled("egrad2rgrad is the gradient for the metric", egrad2rgrad=lambda self, x, u: 2 * base.proju(x, u))
    yield spoiled(
        "inner is a metric",
        inner=lambda self, x, u, v=None, keepdim=False: (1 + (v is None)) * base.inner(x, u, v, keepdim=keepdim),
    )
    yield spoiled(
        "retr lands on the manifold", retr=lambda self, x, u: base.retr(x, u) if u.abs().max() < 1.1 else x + u
    )
    yield spoiled("retr(x, 0) is x", retr=jumps)
    yield spoiled("retr moves along the vector", retr=lambda self, x, u: base.retr(x, 0.9 * u), expmap=no_expmap)
    yield "retr has its order", lambda: check_manifold(Stiefel("qr"), (5, 2), order=2)
    yield spoiled("retr has a gradient", retr=torch.no_grad()(lambda self, x, u: base.retr(x, u)))
    yield spoiled(
        "expmap moves along the vector",
        expmap=lambda self, x, u: base.expmap(x, u * (1 if u.abs().max() > 1e-3 else 2)),
    )
    backwards = type("Broken", (SPD,), {"logmap": lambda self, x, y: -SPD().logmap(x, y)})
    yield "logmap inverts expmap", lambda: check_manifold(backwards(), (3, 3))
    yield spoiled("transp gives tangent vectors", transp=lambda self, x, y, v: v)
    yield spoiled("transp is linear", transp=lambda self, x, y, v: base.proju(y, v) * v.norm())
    yield spoiled("a batch equals its elements", retr=lambda self, x, u: base.retr(x, u * (1 + 1e-8 * (x.ndim - 2))))
    yield spoiled(
        "dtype and device are preserved",
        inner=lambda self, x, u, v=None, keepdim=False: base.inner(x, u, v, keepdim=keepdim).double(),
    )


# ---- optimizers


class Descent(torch.optim.Optimizer):
    """Riemannian gradient descent with momentum, for the broken ones to differ from."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {"lr": 0.05, "maximize": False})

    def direction(self, group: dict[str, Any], p: Any) -> Tensor:
        """What is added to the point, before its length."""
        g = p.manifold.egrad2rgrad(p, p.grad) * (-1 if group["maximize"] else 1)
        buffer = self.state[p].get("momentum", torch.zeros_like(g))
        self.state[p]["momentum"] = p.manifold.proju(p, 0.5 * buffer + g)
        return -self.state[p]["momentum"]

    def move(self, group: dict[str, Any], p: Any) -> None:
        p.copy_(p.manifold.retr(p, group["lr"] * self.direction(group, p)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(group, p)


class LeavesTheManifold(Descent):
    def move(self, group: dict[str, Any], p: Any) -> None:
        p.add_(group["lr"] * self.direction(group, p))


class UphillFirst(Descent):
    def direction(self, group: dict[str, Any], p: Any) -> Tensor:
        first = "momentum" not in self.state[p]
        return super().direction(group, p) * (-1 if first else 1)


class TooSlow(Descent):
    def direction(self, group: dict[str, Any], p: Any) -> Tensor:
        return 1e-4 * super().direction(group, p)


class NeverRests(Descent):
    def move(self, group: dict[str, Any], p: Any) -> None:
        p.copy_(p.manifold.retr(p, (group["lr"] + 1e-4) * self.direction(group, p)))


class MovesAll(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                p.copy_(p.manifold.projx(p + 1e-3 * p.flip(-2)))


class Minimizes(Descent):
    def direction(self, group: dict[str, Any], p: Any) -> Tensor:
        return super().direction({**group, "maximize": False}, p)


class SharesTheRate(Descent):
    def direction(self, group: dict[str, Any], p: Any) -> Tensor:
        return super().direction(group, p) / len(group["params"])


class ScalesGradients(Descent):
    def move(self, group: dict[str, Any], p: Any) -> None:
        super().move(group, p)
        p.grad.mul_(0.5)


class SavesNothing(Descent):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class ForgetsInCopies(Descent):
    def __deepcopy__(self, memo: Any) -> "ForgetsInCopies":
        return type(self)([memo[id(p)] for p in self.param_groups[0]["params"]])


def optimizers() -> Iterator[tuple[str, Check]]:
    """The law, and the check of an optimizer that breaks it."""
    kinds: dict[str, Any] = {
        "points stay on the manifold": LeavesTheManifold,
        "a step goes downhill": UphillFirst,
        "it converges to a known optimum": TooSlow,
        "lr=0 does not move a point": NeverRests,
        "points without a gradient do not move": MovesAll,
        "maximize mirrors minimize": Minimizes,
        "points move independently": SharesTheRate,
        "p.grad is not modified": ScalesGradients,
        "a saved state resumes bit for bit": SavesNothing,
        "deep copies resume bit for bit": ForgetsInCopies,
    }
    for law, kind in kinds.items():
        yield law, partial(check_optimizer, kind, Stiefel(), (5, 2))


# ---- parametrizations

COPIES = "deep copies are equal and independent"  # is broken by whatever uses torch's register_parametrization alone


class Polar(nn.Module):
    """The polar factor of a free tensor, for the broken ones to differ from."""

    def forward(self, X: Tensor) -> Tensor:
        return linalg.polar(X)[0]

    def right_inverse(self, W: Tensor) -> Tensor:
        return linalg.polar(W)[0]


class AddsADimension(Polar):
    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X)[None]

    def right_inverse(self, W: Tensor) -> Tensor:
        return super().right_inverse(W[0] if W.ndim == 3 else W)


class Drifts(Polar):
    """The Neumann series around a base point, which a few steps take away from the manifold."""

    base: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(5, 3))

    def forward(self, X: Tensor) -> Tensor:
        return linalg.cayley_at(self.base, X, 2)

    def right_inverse(self, W: Tensor) -> Tensor:
        self.base = super().right_inverse(W).detach()
        return torch.zeros_like(W)


class Point(nn.Module):
    """Stored as it is; only a Riemannian optimizer keeps it where it is."""

    def forward(self, X: Tensor) -> Tensor:
        return X

    def right_inverse(self, W: Tensor) -> Tensor:
        return W


class Flips(Polar):
    def right_inverse(self, W: Tensor) -> Tensor:
        return super().right_inverse(W).flip(-1)


class WrongGradient(Polar):
    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X.detach() + 1.5 * (X - X.detach()))


class LosesItsBase(Polar):
    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.linalg.qr(torch.randn(3, 3))[0], persistent=False)

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X) @ self.turn

    def right_inverse(self, W: Tensor) -> Tensor:
        return super().right_inverse(W) @ self.turn.mT


class FloatOnly(Polar):
    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X) + (1e-3 if X.dtype == torch.float64 else 0)


class LosesPrecisionWithoutGradients(Polar):
    def forward(self, X: Tensor) -> Tensor:
        W = super().forward(X)
        return W if torch.is_grad_enabled() else W + 1e-3


def put_on(parametrization: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", parametrization(), unsafe=True)


def point_on(layer: Any) -> Any:
    layer.weight.data = linalg.polar(layer.weight.data)[0]
    layer.weight.manifold = Stiefel()
    return put_on(Point)(layer)


def pickled_as_plain(layer: Any) -> Any:
    put_on(Polar)(layer)
    kind: Any = type(layer)
    kind.__reduce_ex__ = lambda self, protocol: (nn.Linear, (3, 5))
    return layer


def parametrizations() -> Iterator[tuple[str, Check]]:
    """The law, and the check of a parametrization that breaks it."""
    kinds: dict[str, Any] = {
        "shape and dtype are preserved": put_on(AddsADimension),
        "the constraint holds, at once and after training": put_on(Drifts),
        "assigning projects": point_on,
        "assigning the current weight changes nothing": put_on(Flips),
        "gradients match finite differences": put_on(WrongGradient),
        "state_dict preserves the weight": put_on(LosesItsBase),
        COPIES: put_on(Polar),
        "pickling preserves the weight or is refused": pickled_as_plain,
        "dtype changes preserve the weight": put_on(FloatOnly),
        "removing the constraint preserves the weight": put_on(LosesPrecisionWithoutGradients),
    }
    for law, kind in kinds.items():
        skip = () if law == COPIES else (COPIES,)
        yield law, partial(check_parametrization, kind, nn.Linear(3, 5), holds=assert_orthonormal, skip=skip)


# ---- token interfaces


class GivesItsGraph(TransposeTying):
    def materialize(self) -> tuple[Tensor, Tensor]:
        return self.weight.clone(), self.weight.T.clone()


class GivesItsTable(TransposeTying):
    def materialize(self) -> tuple[Tensor, Tensor]:
        return self.weight.detach(), super().materialize()[1]


class ScalesTheLookup(TransposeTying):
    def embed(self, ids: Tensor) -> Tensor:
        return 1.001 * super().embed(ids)


class ShiftsTheLogits(TransposeTying):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) + 1


class ScalesTheLoss(TransposeTying):
    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return 1.001 * super().loss(hidden, targets, ignore_index=ignore_index)


class TakesAnyId(TransposeTying):
    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.long() % self.vocab_size, self.weight)


class SavesNoScale(TransposeTying):
    def __init__(self) -> None:
        super().__init__(9, 4)
        self.factor = 1 + torch.rand(1).item()

    def materialize(self) -> tuple[Tensor, Tensor]:
        E, W_out = super().materialize()
        return self.factor * E, W_out

    def embed(self, ids: Tensor) -> Tensor:
        return self.factor * super().embed(ids)


class CopiesAreItself(TransposeTying):
    def __deepcopy__(self, memo: Any) -> "CopiesAreItself":
        copied = copy.copy(self)
        copied._parameters = dict(self._parameters)
        return copied


def interfaces() -> Iterator[tuple[str, Check]]:
    """The law, and the check of an interface that breaks it."""
    kinds: dict[str, Any] = {
        "materialize returns E and W_out": lambda: GivesItsGraph(9, 4),
        "materialized tables are copies": lambda: GivesItsTable(9, 4),
        "embed looks up rows of E": lambda: ScalesTheLookup(9, 4),
        "logits are h W_out": lambda: ShiftsTheLogits(9, 4),
        "loss is the cross-entropy of logits": lambda: ScalesTheLoss(9, 4),
        "invalid ids are rejected": lambda: TakesAnyId(9, 4),
        "state_dict preserves the tables": SavesNoScale,
        "deep copies are equal and independent": lambda: CopiesAreItself(9, 4),
        "W_out E = I": lambda: PIT.from_embedding(torch.randn(9, 4), bridge=True, memory="frozen"),
    }
    for law, make in kinds.items():
        yield law, partial(check_token_interface, make, consistent=law == "W_out E = I")
