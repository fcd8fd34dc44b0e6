"""A group's "scale": every entry, or every column of a point, with a learning rate of its own."""

from typing import Any

import geoopt
import numpy as np
import pytest
import scipy.linalg
import torch
from optim_cases import as_point, drive, point, seeded, tangent
from torch import Tensor, nn

from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups

KINDS = [(RiemannianAdam, torch.optim.Adam, {}), (RiemannianSGD, torch.optim.SGD, {"momentum": 0.9})]


@pytest.mark.parametrize(("ours", "theirs", "options"), KINDS)
def test_each_entry_moves_as_with_its_own_rate(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    start, scale = torch.randn(3, 4), 10 ** torch.linspace(-3, 4, 12).view(3, 4)
    p = nn.Parameter(start * scale)  # large numbers that move little by their own measure
    drive(ours([{"params": [p], "scale": scale}], lr=1e-3, **options), [p], 10, seeded)
    singles = [nn.Parameter(x.clone()) for x in (start * scale).flatten()]
    groups = [{"params": [x], "lr": 1e-3 * s.item()} for x, s in zip(singles, scale.flatten(), strict=True)]
    drive(theirs(groups, **options), singles, 10, lambda step, i, x: seeded(step, 0, p).flatten()[i])
    expected = torch.stack([x.detach() for x in singles])
    torch.testing.assert_close(p.detach().flatten(), expected, rtol=1e-6, atol=0)


def test_complex_entries_have_real_scales() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    drive(
        RiemannianSGD([{"params": [p], "scale": torch.tensor([0.0, 2.0])}], lr=0.1), [p], 1, lambda *_: p.detach() * 1j
    )
    torch.testing.assert_close(p.detach(), torch.tensor([1.0, 1.0 - 0.2j]))


def nearest_tangent(X: np.ndarray, W: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Least squares over a basis of the tangent space, columns weighted by 1/scale."""
    n, p = X.shape
    rows = []
    for i in range(p):
        for j in range(i + 1):
            E = np.zeros((p, p))
            E[i, j] = E[j, i] = 1
            rows.append((X @ E).flatten())  # U is tangent where tr(U' X E) = 0 for every symmetric E
    weights = np.tile(scale, (n, 1)).flatten()
    constraint = np.array(rows) * weights
    change = -np.linalg.lstsq(constraint, np.array(rows) @ W.flatten(), rcond=None)[0]
    return W + (change * weights).reshape(n, p)


@pytest.mark.parametrize("options", [{}, {"second_moment": "row"}, {"project_every": 2}], ids=str)
def test_columns_of_a_point(options: dict[str, Any]) -> None:
    X, scale = point(12, 4, dtype=torch.float64), torch.tensor([1.0, 0.1, 3.0, 0.01], dtype=torch.float64)
    lr, b1, b2, eps = 0.02, 0.8, 0.9, 1e-6
    optimizer = RiemannianAdam([{"params": [X], "scale": scale}], lr=lr, betas=(b1, b2), eps=eps, **options)
    Y, m, v = X.detach().numpy().copy(), np.zeros(1), np.zeros(1)
    axis: Any = 1 if options.get("second_moment") == "row" else ()
    for t in range(1, 9):
        drive(optimizer, [X], 1, seeded, start=t)
        G = seeded(t, 0, X).numpy()
        G = tangent(Y, G) if t % options.get("project_every", 1) == 1 % options.get("project_every", 1) else G
        m, v = b1 * m + (1 - b1) * G, b2 * v + (1 - b2) * np.mean(G**2, axis=axis, keepdims=axis != ())
        step = lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        Y = scipy.linalg.polar(Y - nearest_tangent(Y, step * scale.numpy(), scale.numpy()))[0]
    np.testing.assert_allclose(X.detach().numpy(), Y, atol=1e-11)


@pytest.mark.parametrize("retraction", ["qr", "cayley", "cayley-neumann"])
def test_every_retraction_moves_along_the_scaled_direction(retraction: Any) -> None:
    X, scale, h = point(12, 4, retraction, torch.float64), torch.tensor([1.0, 0.1, 3.0, 0.01]).double(), 1e-4
    before, G = X.detach().clone(), seeded(1, 0, X)
    drive(RiemannianSGD([{"params": [X], "scale": scale}], lr=h), [X], 1, seeded, start=1)
    W = tangent(before.numpy(), G.numpy()) * scale.numpy()
    expected = nearest_tangent(before.numpy(), W, scale.numpy())
    np.testing.assert_allclose((before - X.detach()).numpy() / h, expected, atol=1e-2)  # first order in h


def test_points_of_one_shape_keep_their_own_scale() -> None:
    together = [point(9, 3) for _ in range(3)]
    alone = [as_point(nn.Parameter(p.detach().clone())) for p in together]
    options: list[dict[str, Any]] = [{"scale": torch.tensor([1.0, 2.0, 3.0])}, {"scale": torch.ones(3)}, {}]
    groups = [{"params": [p], **of} for p, of in zip(together, options, strict=True)]
    drive(RiemannianAdam(groups, lr=0.05), together, 5, seeded)
    for i, (p, of) in enumerate(zip(alone, options, strict=True)):
        own = RiemannianAdam([{"params": [p], **of}], lr=0.05)
        drive(own, [p] * (i + 1), 5, seeded)  # with the gradients of the i-th
        torch.testing.assert_close(p.detach(), together[i].detach(), rtol=0, atol=1e-6)


def test_scales_come_through_param_groups_and_a_copy_of_the_state() -> None:
    layer = nn.Linear(4, 3, bias=False)
    groups = param_groups(layer, overrides={"weight": {"scale": torch.zeros(3, 4)}})
    optimizer = RiemannianAdam(groups, lr=0.1)
    before = layer.weight.detach().clone()
    drive(optimizer, [layer.weight], 2, seeded)
    assert torch.equal(layer.weight, before) and "scale" not in optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    drive(optimizer, [layer.weight], 1, seeded)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("scale", "options", "message"),
    [
        (torch.ones(3), {}, r"shape \(2, 3\)"),
        (-torch.ones(2, 3), {}, "from -1 to -1"),
        (torch.full((2, 3), float("nan")), {}, "finite"),
        (torch.ones(2, 3), {"weight_decay": 0.1}, "needs weight_decay=0"),
    ],
)
def test_bad_scales(scale: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RiemannianAdam([{"params": [nn.Parameter(torch.ones(2, 3))], "scale": scale}], **options)
    sphere = geoopt.ManifoldParameter(torch.tensor([1.0, 0.0]), manifold=geoopt.Sphere())
    with pytest.raises(ValueError, match="of Stiefel only"):
        RiemannianAdam([{"params": [sphere], "scale": torch.ones(2)}])
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        RiemannianAdam([{"params": [point(7, 3)], "scale": torch.ones(7, 3)}])
