"""Functions and models whose derivatives are taken in every way, and the oracle for them: finite differences.

A differenced gradient is the closed-form one of an ordinary backward pass, which has its own tests against dense formulas.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import manifold_tying as mt
from manifold_tying import linalg
from manifold_tying.poet import parametrization

V, D = 23, 6
DOUBLE = torch.float64


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def curvature(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The Hessian times v, by differences of ordinary gradients."""
    step = 1e-5
    return (gradient(f, x + step * v) - gradient(f, x - step * v)) / (2 * step)


def _cubes(matrix: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A scalar function of a matrix whose Hessian no symmetry makes vanish."""

    def f(x: Tensor) -> Tensor:
        X = matrix(x)
        return (X**3 * torch.linspace(-1, 1, X.numel(), dtype=DOUBLE).view_as(X)).sum()

    return f


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def _rotation(A: Tensor) -> Tensor:
    return A - A.mT


_TALL, _SQUARE = _normal(5, 3), _normal(4, 4)
_BASE = torch.linalg.qr(_normal(5, 5, seed=1))[0][:, :3]

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "polar": (_cubes(lambda Y: linalg.polar(Y)[0]), _TALL),
    "polar, H": (_cubes(lambda Y: linalg.polar(Y)[1]), _TALL),
    "polar, equal singular values": (_cubes(lambda Y: linalg.polar(Y)[0]), _BASE),
    "polar, square": (_cubes(lambda Y: linalg.polar(Y)[0]), _SQUARE + 3 * torch.eye(4, dtype=DOUBLE)),
    "qr": (_cubes(lambda Y: linalg.orthonormalize(Y, "qr")), _TALL),
    "cayley": (_cubes(lambda Y: linalg.cayley(_rotation(Y))), _SQUARE),
    "cayley-neumann, two terms": (_cubes(lambda Y: linalg.cayley_neumann(_rotation(Y))), _SQUARE),
    "cayley-neumann, three terms": (_cubes(lambda Y: linalg.cayley_neumann(_rotation(Y), 3)), _SQUARE),
    "cayley_at, tall": (_cubes(lambda Y: linalg.cayley_at(_BASE, Y)), _TALL),
    "cayley_at, square": (_cubes(lambda Y: linalg.cayley_at(torch.eye(4, dtype=DOUBLE), Y)), _SQUARE),
    "cayley_at, series": (_cubes(lambda Y: linalg.cayley_at(_BASE, Y, 2)), _TALL),
}


class Formulation(nn.Module):
    """A layer under an equivalence that is made to take one of its two formulations."""

    def __init__(self, layer: nn.Module, input_centric: bool) -> None:
        super().__init__()
        self.layer = layer
        self.input_centric = input_centric

    def forward(self, x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parametrization, "prefers_input_centric", lambda *args, **options: self.input_centric)
            return self.layer(x)


class Weight(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return x[:, :1] * weight.flatten()


class LanguageModel(nn.Module):
    """Token ids to a loss, with a body between the two sides of an interface."""

    def __init__(self, interface: Any, logits: bool) -> None:
        super().__init__()
        self.interface = interface
        self.body = nn.Linear(D, D)
        self.logits = logits

    def forward(self, ids: Tensor) -> Tensor:
        hidden, targets = self.body(self.interface.embed(ids)).tanh(), ids.roll(1).clone()
        targets[..., 1] = -100
        if self.logits:
            return F.cross_entropy(self.interface.logits(hidden).flatten(0, -2), targets.flatten())
        return self.interface.loss(hidden, targets)


def equivalent(**options: Any) -> nn.Module:
    return mt.equivalence(nn.Linear(6, 9), seed=1, **options)


def definite() -> nn.Module:
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(6))
    return mt.spd(layer, "weight")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "polar, wide": lambda: mt.orthogonal(nn.Linear(6, 4)),
    "cayley-neumann": lambda: mt.orthogonal(nn.Linear(6, 9), map="cayley-neumann"),
    "stiefel": lambda: mt.stiefel(nn.Linear(6, 9)),
    "spd": definite,
    "equivalence, weight-centric": lambda: Formulation(equivalent(block_size=4, terms=2), False),
    "equivalence, full, input-centric": lambda: Formulation(equivalent(block_size=4, scheme="full", terms=2), True),
    "equivalence, exact, input-centric": lambda: Formulation(equivalent(block_size=4, terms=None), True),
    "equivalence, weight": lambda: Weight(mt.equivalence(nn.Conv2d(3, 4, 2), block_size=3, seed=1)),
    "transpose tying": lambda: LanguageModel(mt.TransposeTying(V, D), False),
    "PIT, free": lambda: LanguageModel(mt.PIT(V, D, std=0.3), False),
    "PIT, trainable": lambda: LanguageModel(mt.PIT(V, D, memory="trainable"), False),
    "PIT, logits": lambda: LanguageModel(mt.PIT(V, D, memory="trainable"), True),
}


class Case:
    """A model as a scalar function of one vector, all that it trains, and of an input."""

    def __init__(self, name: str) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(DOUBLE)  # a base that is orthonormal to float32 rounding would not do
        try:
            self.model = MODELS[name]()
        finally:
            torch.set_default_dtype(before)
        self.trained = {key: p.detach() for key, p in self.model.named_parameters() if p.requires_grad}
        self.start = torch.cat([p.flatten() for p in self.trained.values()])
        self.start = self.start + 0.1 * torch.randn_like(self.start)
        self.direction = torch.randn_like(self.start)
        # Nine tokens: PIT multiplies six and more by T itself.
        self.inputs = torch.randint(V, (3, 9)) if "PIT" in name or "tying" in name else _normal(3, 9, 6)

    def parameters(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([p.numel() for p in self.trained.values()])
        return {key: part.view_as(p) for (key, p), part in zip(self.trained.items(), parts, strict=True)}

    def outputs(self, vector: Tensor, x: Tensor) -> Tensor:
        return functional_call(self.model, self.parameters(vector), (x,))

    def __call__(self, vector: Tensor, x: Tensor | None = None) -> Tensor:
        y = self.outputs(vector, self.inputs[0] if x is None else x)
        return y if y.ndim == 0 else (y**3).mean()
