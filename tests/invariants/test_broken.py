"""Every law of every contract can fail: something breaks it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import SPD, Stiefel, TransposeTying, linalg
from manifold_tying import testing as mtt
from manifold_tying.optim import RiemannianSGD

# ---- manifolds

base = Stiefel()


def manifold(**methods: Any) -> Any:
    return partial(mtt.check_manifold, type("Broken", (Stiefel,), methods)(), (5, 2))


def opposite(method: Any) -> Any:
    return lambda self, *tensors: -method(*tensors)


MANIFOLDS: dict[str, Callable[..., None]] = {
    "the checks reject what is off the manifold": manifold(_check_point_on_manifold=lambda self, x, **_: (True, None)),
    "random points are on the manifold": manifold(random=lambda self, *shape, **options: torch.randn(shape, **options)),
    "random points are uniform": partial(
        manifold(random=lambda self, *shape, **options: linalg.polar(torch.randn(shape, **options).abs())[0]),
        uniform=True,
    ),
    "projx lands on the manifold": manifold(projx=lambda self, x: (1 + 1e-9) * base.projx(x)),
    "projx is idempotent": manifold(projx=opposite(base.projx)),
    "projx is the nearest point": manifold(projx=lambda self, x: linalg.orthonormalize(x, "qr")),
    "proju and egrad2rgrad give tangent vectors": manifold(egrad2rgrad=lambda self, x, u: u),
    "proju keeps all tangent vectors": manifold(proju=lambda self, x, u: torch.zeros_like(u)),
    "proju is orthogonal": manifold(proju=lambda self, x, u: 0.9 * base.proju(x, u)),
    "egrad2rgrad is the gradient for the metric": manifold(egrad2rgrad=lambda self, x, u: 2 * base.proju(x, u)),
    "inner is a metric": manifold(
        inner=lambda self, x, u, v=None, keepdim=False: (1 + (v is None)) * base.inner(x, u, v, keepdim=keepdim)
    ),
    "retr lands on the manifold": manifold(retr=lambda self, x, u: x + u),
    "retr(x, 0) is x": manifold(retr=opposite(base.retr)),
    "retr moves along the vector": manifold(retr=lambda self, x, u: base.retr(x, 0.9 * u)),
    "retr has its order": partial(mtt.check_manifold, Stiefel("qr"), (5, 2), order=2),
    "retr has a gradient": manifold(retr=torch.no_grad()(lambda self, x, u: base.retr(x, u))),
    "expmap moves along the vector": manifold(expmap=lambda self, x, u: base.expmap(x, 2 * u)),
    "logmap inverts expmap": partial(
        mtt.check_manifold, type("Broken", (SPD,), {"logmap": opposite(SPD().logmap)})(), (3, 3)
    ),
    "transp gives tangent vectors": manifold(transp=lambda self, x, y, v: v),
    "transp is linear": manifold(transp=lambda self, x, y, v: base.proju(y, v) * v.norm()),
    "transp from a point to itself keeps the vector": manifold(transp=lambda self, x, y, v: 0 * v),
    "a batch equals its elements": manifold(retr=lambda self, x, u: base.retr(x, u * (1 + 1e-8 * (x.ndim - 2)))),
    "dtype and device are preserved": manifold(
        inner=lambda self, x, u, v=None, keepdim=False: base.inner(x, u, v, keepdim=keepdim).double()
    ),
}


# ---- optimizers


class Momentum(RiemannianSGD):
    """For the broken ones to differ from. ``before`` and ``after`` are called with each group around a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.5)

    def before(self, group: dict[str, Any]) -> None: ...

    def after(self, group: dict[str, Any]) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.before(group)
        super().step()
        for group in self.param_groups:
            self.after(group)


def optimizer(**methods: Any) -> Any:
    return type("Broken", (Momentum,), methods)


def points(act: Callable[[Any], object]) -> Any:
    """Something that is done to each point of a group."""
    return lambda self, group: [act(p) for p in group["params"]]


class Forgets(Momentum):
    def load_state_dict(self, state_dict: Any) -> None: ...

    def __deepcopy__(self, memo: Any) -> "Forgets":
        return Forgets([memo[id(p)] for p in self.param_groups[0]["params"]])


class First(Momentum):
    def step(self, closure: Any = None) -> Any:
        self.param_groups, groups = self.param_groups[:1], self.param_groups
        super().step()
        self.param_groups = groups


climbs = optimizer(before=points(lambda p: None if p.grad is None else p.grad.neg_()))
moves = optimizer(after=points(lambda p: p.copy_(p.manifold.projx(p + 1e-3 * p.flip(-2)))))
OPTIMIZERS: dict[str, Any] = {
    "points stay on the manifold": optimizer(after=points(lambda p: p.mul_(1.001))),
    "huge gradients leave points on the manifold": optimizer(
        after=points(lambda p: p.grad is not None and p.mul_(1 + 1e-3 * (p.grad.abs().max() > 1e100)))
    ),
    "a step goes downhill": climbs,
    "it converges to a known optimum": climbs,
    "lr=0 does not move a point": moves,
    "points without a gradient do not move": moves,
    "maximize mirrors minimize": optimizer(before=lambda self, group: group.update(maximize=False)),
    "points move independently": optimizer(before=lambda self, group: group.update(lr=0.05 / len(group["params"]))),
    "points of added groups move": First,
    "closures are run": climbs,
    "p.grad is not modified": climbs,
    "a saved state resumes bit for bit": Forgets,
    "deep copies resume bit for bit": Forgets,
}


# ---- parametrizations


class Polar(nn.Module):
    """The polar factor of a free tensor, for the broken ones to differ from."""

    def forward(self, X: Tensor) -> Tensor:
        return linalg.polar(X)[0]

    def right_inverse(self, W: Tensor) -> Tensor:
        return linalg.polar(W)[0]


def polar(X: Tensor) -> Tensor:
    return linalg.polar(X)[0]


def depends_on_the_mode(self: Polar, X: Tensor) -> Tensor:
    """On the dtype, and on whether gradients are enabled."""
    return polar(X) + (0 if X.dtype == torch.float32 and torch.is_grad_enabled() else 1e-3)


class LosesItsBase(Polar):
    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.linalg.qr(torch.randn(3, 3))[0], persistent=False)

    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X) @ self.turn

    def right_inverse(self, W: Tensor) -> Tensor:
        return super().right_inverse(W) @ self.turn.mT


def broken(**methods: Any) -> Callable[[Any], Any]:
    return put_on(type("Broken", (Polar,), methods))


def put_on(parametrization: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", parametrization(), unsafe=True)


def pickled_as_plain(layer: Any) -> Any:
    put_on(Polar)(layer)
    kind: Any = type(layer)
    kind.__reduce_ex__ = lambda self, protocol: (nn.Linear, (3, 5))
    return layer


unconstrained = broken(forward=lambda self, X: X, right_inverse=lambda self, W: W)
PARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "shape and dtype are preserved": broken(forward=lambda self, X: polar(X).double()),
    "the constraint holds, at once and after training": unconstrained,
    "the constraint holds far from the start": broken(forward=lambda self, X: polar(X) * (1 + 1e-6 * (X.norm() > 30))),
    "assigning projects": unconstrained,
    "assigning the current weight changes nothing": broken(right_inverse=lambda self, W: polar(W).flip(-1)),
    "a tied weight is kept or refused": broken(right_inverse=lambda self, W: 2 * polar(W)),
    "gradients match finite differences": broken(forward=lambda self, X: polar(X.detach() + 1.5 * (X - X.detach()))),
    "state_dict preserves the weight": put_on(LosesItsBase),
    "deep copies are equal and independent": put_on(Polar),  # as whatever is registered by torch alone
    "pickling preserves the weight or is refused": pickled_as_plain,
    "dtype changes preserve the weight": broken(forward=depends_on_the_mode),
    "removing the constraint preserves the weight": broken(forward=depends_on_the_mode),
}


# ---- token interfaces


class Spoiled(TransposeTying):
    def embed(self, ids: Tensor) -> Tensor:
        return 1.001 * F.embedding(ids.long() % self.vocab_size, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) + 1

    def loss(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100, **_: Any) -> Tensor:
        return 1.001 * super().loss(hidden, targets, ignore_index=ignore_index)

    def load_state_dict(self, *_: Any, **__: Any) -> Any: ...

    def __deepcopy__(self, memo: Any) -> "Spoiled":
        return self


class Detached(TransposeTying):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids).detach()


def materialized(materialize: Callable[[TransposeTying], tuple[Tensor, Tensor]]) -> Any:
    return type("Broken", (TransposeTying,), {"materialize": materialize})


INTERFACES: dict[str, Any] = dict.fromkeys((law.name for law in mtt.INTERFACE_LAWS), Spoiled) | {
    "materialize returns E and W_out": materialized(lambda self: (self.weight.clone(), self.weight.T.clone())),
    "gradients match finite differences": Detached,
    "materialized tables are copies": materialized(lambda self: (self.weight.detach(), self.weight.detach().T.clone())),
}


# ---- what breaks each law

ALL: dict[str, tuple[Any, dict[str, Callable[..., None]]]] = {
    "manifold": (mtt.MANIFOLD_LAWS, MANIFOLDS),
    "optimizer": (
        mtt.OPTIMIZER_LAWS,
        {law: partial(mtt.check_optimizer, kind, Stiefel(), (5, 2)) for law, kind in OPTIMIZERS.items()},
    ),
    "parametrization": (
        mtt.PARAMETRIZATION_LAWS,
        {
            law: partial(mtt.check_parametrization, constrain, nn.Linear(3, 5), holds=mtt.assert_orthonormal)
            for law, constrain in PARAMETRIZATIONS.items()
        },
    ),
    "interface": (
        mtt.INTERFACE_LAWS,
        {
            law: partial(mtt.check_token_interface, partial(kind, 9, 4), consistent=True)
            for law, kind in INTERFACES.items()
        },
    ),
}


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("kind", ALL)
def test_every_law_is_broken_by_something(kind: str) -> None:
    laws = {law.name for law in ALL[kind][0]}
    assert laws == set(ALL[kind][1])
    for law, check in ALL[kind][1].items():
        with pytest.raises(mtt.BrokenLaws) as caught:
            check(skip=laws - {law})
        assert set(caught.value.broken) == {law} and law in str(caught.value)
        drawn = not law.startswith(("invalid ids", "a tied weight"))
        assert drawn == ("example: " in str(caught.value))
