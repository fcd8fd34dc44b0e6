"""A user's program. mypy checks it as with --strict (pyproject.toml), so ``assert_type`` fails for a result of type Any."""

from collections.abc import Callable
from typing import Any, assert_type

import geoopt
import pytest
import torch
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups


class Centered(geoopt.Manifold):
    """Vectors whose entries sum to 0."""

    name, ndim, reversible = "Centered", 1, False

    def projx(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(u)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return self.projx(v)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        return (u * (u if v is None else v)).sum(-1, keepdim=keepdim)

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        return bool((x.mean(-1).abs() <= atol).all()), "the entries do not sum to 0"

    def _check_vector_on_tangent(self, x: Tensor, u: Tensor, **tolerances: float) -> tuple[bool, str | None]:
        return self._check_point_on_manifold(u, **tolerances)

    egrad2rgrad, expmap = proju, retr


def test_layers_keep_their_type() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    assert_type(mt.stiefel(nn.Linear(6, 4), retraction="qr"), nn.Linear)
    assert_type(mt.sphere(nn.Embedding(9, 4)), nn.Embedding)
    assert_type(mt.orthogonal(nn.Conv2d(3, 4, 2)), nn.Conv2d)
    assert_type(mt.constrain(nn.Linear(6, 4), "weight", Centered()), nn.Linear)
    assert_type(mt.equivalence_(model, block_size=2), tuple[list[str], list[str]])
    assert_type(mt.merge(model), int)
    assert_type(mt.materialize(model), nn.Sequential)


def test_training_has_types() -> None:
    pit = assert_type(mt.PIT(12, 4, memory="trainable"), mt.PIT)
    ids = torch.tensor([[3, 5, 2]])
    groups = assert_type(param_groups(pit, manifold_lr=0.1), list[dict[str, Any]])
    optimizer = assert_type(RiemannianAdam(groups, lr=0.1), RiemannianAdam)
    loss = assert_type(pit.loss(pit.embed(ids), ids, z_loss=1e-4), Tensor)
    loss.backward()
    assert_type(optimizer.step(), None)
    hidden = assert_type(pit(ids), Tensor)
    assert_type(pit.logits(hidden), Tensor)
    E, W_out = assert_type(pit.materialize(), tuple[Tensor, Tensor])
    torch.testing.assert_close(W_out @ E, torch.eye(4), atol=1e-5, rtol=0)
    own = mt.constrain(nn.Linear(6, 4), "weight", Centered())
    sgd = RiemannianSGD(own.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = own(torch.eye(6)).square().sum()
        loss.backward()
        return loss

    assert_type(sgd.step(closure), Tensor)
    torch.testing.assert_close(own.weight.sum(-1), torch.zeros(4))


def test_functions_and_points_have_types() -> None:
    X = assert_type(mt.Stiefel().projx(torch.randn(5, 3)), Tensor)
    assert_type(mt.linalg.polar(X), tuple[Tensor, Tensor])
    assert_type(mt.linalg.defect(X), Tensor)
    assert_type(mt.Sphere().dist(X, X), Tensor)
    assert_type(mt.SPD().logmap(torch.eye(3), torch.eye(3)), Tensor)
    assert_type(mt.diagnostics.delta_ti(X, X.mT), float)


def test_adapters_have_types() -> None:
    from manifold_tying.peft import PoetConfig  # takes seconds

    assert_type(PoetConfig(target_modules=["q_proj"]).block_size, int)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mt.stifel,  # type: ignore[attr-defined]
        lambda: mt.optim.MergeCallbak,  # type: ignore[attr-defined]
        lambda: mt.PIT(12, 4, memry="free"),  # type: ignore[call-arg]
        lambda: mt.stiefel(nn.Linear(6, 4), retraction="polr"),  # type: ignore[arg-type]
    ],
)
def test_mypy_sees_what_python_refuses(wrong: Callable[[], object]) -> None:
    """mypy complains of an ignore that it does not need."""
    with pytest.raises((AttributeError, TypeError, ValueError)):
        wrong()
