"""RiemannianMuon: who is moved by which rule, and the rules against NumPy's SVD, torch.optim.Muon and geoopt."""

from collections.abc import Callable
from typing import Any

import geoopt
import numpy as np
import pytest
import torch
from optim_cases import drive, point, polar_np, same, seeded, snapshot, tangent, with_bad
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying import linalg
from manifold_tying.models import Llama, LlamaConfig
from manifold_tying.optim import RiemannianAdam, RiemannianMuon, adam, param_groups

LR, MOMENTUM = 0.05, 0.8


def spectral(U: np.ndarray) -> np.ndarray:
    W, _, Vt = np.linalg.svd(U, full_matrices=False)
    return W @ Vt


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("n", "p"), [(12, 4), (6, 6)])
def test_stiefel_follows_the_formula(n: int, p: int, nesterov: bool) -> None:
    X = point(n, p, dtype=torch.float64)
    Y, average = X.detach().numpy().copy(), np.zeros((n, p))
    drive(RiemannianMuon([X], lr=LR, momentum=MOMENTUM, nesterov=nesterov), [X], 8, seeded, start=1)
    for step in range(1, 9):
        R = tangent(Y, seeded(step, 0, X).numpy())
        average = MOMENTUM * average + (1 - MOMENTUM) * R
        U = (1 - MOMENTUM) * R + MOMENTUM * average if nesterov else average
        Y = polar_np(Y - LR * spectral(tangent(Y, U)))
    torch.testing.assert_close(X.detach(), torch.from_numpy(Y), rtol=0, atol=8 * LR * 5e-3)  # msign is good to 1 %
    assert linalg.defect(X.detach()) < 1e-14


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (3, 20, 20)])
def test_msign_makes_singular_values_one(shape: tuple[int, ...]) -> None:
    M = torch.randn(shape, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    M = U @ torch.diag_embed(torch.logspace(0, -2.8, S.shape[-1], dtype=torch.float64)) @ Vh
    for factor in (1.0, 1e-200, 1e200):
        torch.testing.assert_close(linalg.msign(factor * M), U @ Vh, rtol=0, atol=0.01)
    assert not linalg.msign(torch.zeros(4, 3)).any()


def test_dual_steps_find_the_steepest_tangent_direction() -> None:
    """By weak duality no tangent D of norm 1 has a slope above the nuclear norm of P(M) + X L, whatever the symmetric L."""
    X, M = point(30, 8, dtype=torch.float64).detach(), torch.randn(30, 8, dtype=torch.float64)
    P = torch.from_numpy(tangent(X.numpy(), M.numpy()))
    bound, L = np.inf, torch.zeros(8, 8, dtype=torch.float64)
    for _ in range(300):  # reweighted least squares on the nuclear norm
        W = P + X @ L
        s, V = torch.linalg.eigh(W.T @ W + 1e-12 * torch.eye(8, dtype=torch.float64))
        bound = min(bound, float(torch.linalg.matrix_norm(W, "nuc")))
        A, h = X.T @ P, s.sqrt()
        H = (V * h) @ V.T
        L = V @ (V.T @ (A @ H - H @ A) @ V / (h[:, None] + h)) @ V.T
    slopes, tangency = [], []
    for steps in (0, 8, 64):
        D = linalg.tangent_msign(X, M, steps)
        assert torch.linalg.matrix_norm(D, 2) < 1.01
        T = torch.from_numpy(tangent(X.numpy(), D.numpy()))
        slopes.append(float((P * T).sum() / torch.linalg.matrix_norm(T, 2)) / bound)
        tangency.append(float((D - T).norm() / D.norm()))
    assert tangency[0] > 0.05 and tangency[1] < tangency[0] / 2 and tangency[2] < tangency[0] / 20
    with pytest.raises(ValueError, match="expected steps to be an integer >= 0, got -1"):
        linalg.tangent_msign(X, M, -1)
    assert slopes[0] < slopes[1] < slopes[2] < 1 and slopes[2] > 0.99


def test_a_dual_step_is_the_formula() -> None:
    X, M = point(12, 8, dtype=torch.float64).detach(), torch.randn(12, 8, dtype=torch.float64)
    P = torch.from_numpy(tangent(X.numpy(), M.numpy())) / M.abs().max()
    eps, A, L = 0.1 * P.norm() / 8**0.5, X.T @ P, torch.zeros(8, 8, dtype=torch.float64)

    def inverse_sqrt() -> Tensor:
        s, V = torch.linalg.eigh((P + X @ L).T @ (P + X @ L) + eps**2 * torch.eye(8))
        return V @ torch.diag(s.rsqrt()) @ V.T

    for steps in (1, 2):
        V = (A + L) @ inverse_sqrt()
        L = L - 0.75 * eps * (V + V.T)
        torch.testing.assert_close(linalg.tangent_msign(X, M, steps), (P + X @ L) @ inverse_sqrt(), rtol=0, atol=2e-3)


DIMS: dict[Any, Any] = {"rows": -1, "columns": -2, "matrix": (-2, -1)}


@pytest.mark.parametrize("of", DIMS)
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_vectors_of_spheres_turn_by_an_angle(of: Any, shape: tuple[int, int]) -> None:
    def lengths(A: Tensor) -> Tensor:
        return torch.linalg.vector_norm(A, dim=DIMS[of], keepdim=True)

    X: Any = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    radius, before = lengths(X.detach()), X.detach().clone()
    X.manifold = mt.Sphere(of, radius)
    drive(RiemannianMuon([X], lr=LR), [X], 1, seeded, start=1)

    def projected(A: Tensor) -> Tensor:
        return A - before * (before * A).sum(DIMS[of], keepdim=True) / radius.square()

    D = projected(torch.from_numpy(spectral(projected(seeded(1, 0, X)).numpy())))
    moved = before - LR * radius * D / lengths(D)
    torch.testing.assert_close(X.detach(), moved * radius / lengths(moved), rtol=0, atol=0.02 * LR)
    cosine = (X.detach() * before).sum(DIMS[of], keepdim=True) / radius.square()
    torch.testing.assert_close(cosine.arccos(), torch.full_like(radius, np.arctan(LR)), rtol=1e-7, atol=0)


def test_one_column_moves_as_on_geoopts_sphere() -> None:
    x: Any = nn.Parameter(nn.functional.normalize(torch.randn(9, 1, dtype=torch.float64), dim=0))
    start, g, sphere = x.detach().clone()[:, 0], seeded(1, 0, x)[:, 0], geoopt.Sphere()
    x.manifold = mt.Sphere("columns")
    drive(RiemannianMuon([x], lr=LR), [x], 1, seeded, start=1)
    u = sphere.egrad2rgrad(start, g)
    torch.testing.assert_close(x.detach()[:, 0], sphere.retr(start, -LR * u / u.norm()), rtol=0, atol=1e-15)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.5},
    {"weight_decay": 0.1, "maximize": True, "momentum": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_matrices_move_as_in_torch_and_the_rest_as_by_adamw(options: dict[str, Any]) -> None:
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((9, 5), (5, 9), (7,), (2, 3, 4))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    drive(RiemannianMuon(ours, lr=0.02, **options), ours, 4, seeded)
    options = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, **options}
    sign = -1 if options.pop("maximize", False) else 1
    muon = torch.optim.Muon(theirs[:2], lr=0.02, **options)
    plain = torch.optim.AdamW(theirs[2:], lr=0.02, betas=(0.9, 0.95), weight_decay=options["weight_decay"])
    for step in range(4):
        for i, p in enumerate(theirs):
            p.grad = sign * seeded(step, i, p)
        muon.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_tensor_as_the_rate_does_not_round_the_step() -> None:
    start, ends = torch.randn(32, 16), []
    for lr in (1e-2, torch.tensor(1e-2)):
        p = nn.Parameter(start.clone())
        drive(RiemannianMuon([p], lr=lr), [p], 1, seeded)
        ends.append(p.detach() - start)
    torch.testing.assert_close(
        ends[1], ends[0], rtol=0, atol=1e-6
    )  # bfloat16, in which torch finds D, would leave 1e-5


def moved_by_muon(optimizer: RiemannianMuon) -> set[str]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    names = (zip(group["names"], group["params"], strict=True) for group in optimizer.param_groups)
    return {name for pairs in names for name, p in pairs if "momentum_buffer" in optimizer.state[p]}


def groups_with_names(model: nn.Module, **options: Any) -> RiemannianMuon:
    groups = param_groups(model, **options)
    optimizer = RiemannianMuon(groups, lr=0.01)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["names"] = given["names"]
    return optimizer


INTERFACES: dict[str, Callable[[], mt.TokenInterface]] = {
    "untied": lambda: mt.Untied(31, 8),
    "transpose": lambda: mt.TransposeTying(31, 8),
    "pit-trainable": lambda: mt.PIT(31, 8, memory="trainable"),
    "pit-free": lambda: mt.PIT(31, 8),
}


@pytest.mark.parametrize("interface", INTERFACES)
def test_tables_and_heads_are_not_moved_by_muon(interface: str) -> None:
    config = LlamaConfig(vocab_size=31, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, num_kv_heads=2)
    model = Llama(config, INTERFACES[interface]())
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("interface")}
    assert len(matrices) == 7 and moved_by_muon(groups_with_names(model)) == matrices


@pytest.mark.parametrize("positions", [12, 64])
def test_heads_of_other_models_are_found_and_can_be_asked_for(positions: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(40, 6), nn.Embedding(positions, 6)
            self.up = nn.Linear(6, 12, bias=False)  # the shape of 12 positions
            self.turned = mt.equivalence(nn.Linear(6, 6, bias=False), block_size=3)
            self.constrained = mt.orthogonal(nn.Linear(6, 6, bias=False))
            self.sphere = mt.sphere(nn.Linear(6, 6), of="rows")
            self.head = nn.Linear(6, 40)

    sphere = "sphere.parametrizations.weight.original"
    assert moved_by_muon(groups_with_names(Model())) == {"up.weight", sphere}
    asked = groups_with_names(Model(), overrides={"head.weight": {"use_muon": True}, "sphere*": {"use_muon": False}})
    assert moved_by_muon(asked) == {"up.weight", "head.weight"}


@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_bad_gradient_changes_nothing(where: int, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host does not wait: the CPU plays a device that it runs ahead of."""
    if ahead:
        monkeypatch.setattr(adam, "SYNC_FREE_DEVICES", ("cpu",))
    sphere: Any = nn.Parameter(nn.functional.normalize(torch.randn(5, 3), dim=1))
    sphere.manifold = mt.Sphere()
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4, 6)), point(8, 3), sphere]
    optimizer = RiemannianMuon(params, lr=0.1, fused=True, nonfinite="skip")
    drive(optimizer, params, 2, seeded)
    before = snapshot(optimizer, params)
    drive(optimizer, params, 1, with_bad(where, float("nan")), start=2)
    for a, b in zip(snapshot(optimizer, params), before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)  # a sphere is normalized once more
    drive(optimizer, params, 1, seeded, start=2)
    assert all(not torch.equal(p.detach(), b) for p, b in zip(params, before, strict=False))


@pytest.mark.parametrize("shape", [(8, 3), (4,)])
def test_a_state_of_another_kind_of_optimizer_is_refused(shape: tuple[int, ...]) -> None:
    """Of a point or a matrix; a vector moves by AdamW in both."""
    p = point(*shape) if len(shape) == 2 else nn.Parameter(torch.randn(shape))
    kinds: list[Any] = [RiemannianMuon([p], lr=0.1), RiemannianAdam([p], lr=0.1)]
    for one, other in (kinds, kinds[::-1]):
        drive(one, [p], 1, seeded)
        if len(shape) == 1:
            other.load_state_dict(one.state_dict())
        else:
            with pytest.raises(ValueError, match="another kind of optimizer saved it"):
                other.load_state_dict(one.state_dict())
        one.load_state_dict(one.state_dict())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"foreach": True, "lr": torch.tensor(0.1)}, "foreach=True does not support a tensor lr"),
    ({"momentum": 1.0}, r"expected momentum in \[0, 1\), got 1.0"),
    ({"dual_steps": -1}, "expected dual_steps"),
    ({"adjust_lr_fn": "rms"}, "unknown adjust_lr_fn 'rms'; choose one of match_rms_adamw, original"),
]


@pytest.mark.parametrize("first", [True, False])
def test_the_rule_of_a_group_stays_after_its_first_step(first: bool) -> None:
    X, W = point(12, 4), nn.Parameter(torch.randn(5, 3))
    optimizer = RiemannianMuon([X, W], lr=LR, use_muon=first)
    drive(optimizer, [X, W], 1, seeded)
    before = snapshot(optimizer, [X, W])
    optimizer.param_groups[0]["use_muon"] = not first
    with pytest.raises(ValueError, match="use_muon was changed after the first step of parameter 0 of group 0"):
        drive(optimizer, [X, W], 1, seeded)
    optimizer.param_groups[0]["use_muon"] = first
    assert same(snapshot(optimizer, [X, W]), before)
    drive(optimizer, [X, W], 1, seeded)


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RiemannianMuon([nn.Parameter(torch.ones(2, 2))], **options)
