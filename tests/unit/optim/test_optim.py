"""RiemannianAdam and RiemannianSGD: torch's optimizers on ordinary parameters, straight-line formulas on manifolds."""

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import geoopt
import numpy as np
import pytest
import torch
from optim_cases import as_point, drive, named, point, polar_np, same, seeded, snapshot, tangent, with_bad
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying.linalg import defect
from manifold_tying.optim import RiemannianAdam, RiemannianSGD

RETRACTIONS = ("polar", "qr", "cayley", "cayley-neumann")
MOVES: list[tuple[Any, str, int]] = [(RiemannianAdam, retraction, 1) for retraction in RETRACTIONS]
MOVES += [(RiemannianAdam, "polar", 8), (RiemannianSGD, "polar", 1)]


# Ordinary parameters: bit for bit torch.optim


def ordinary() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(s)) for s in ((7, 5), (11,), (), (3, 2, 4))]


def some(step: int, i: int, p: Tensor) -> Tensor | None:
    """Parameter 2 never has a gradient, parameter 1 only from the fourth step on."""
    return None if i == 2 or (i == 1 and step < 3) else seeded(step, i, p)


def always(step: int, i: int, p: Tensor) -> Tensor | None:
    """torch's fused SGD wants every parameter's momentum to start at the same step."""
    return None if i == 2 else seeded(step, i, p)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),
}
ADAM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True, "eps": 0.0},
    {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
    {"maximize": True, "weight_decay": 0.01},
    {"lr": torch.tensor(0.01), "foreach": False},
    {"lr": torch.tensor(0.01)},
]
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"dampening": 0.5},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "foreach": True},
    {"momentum": 0.9, "maximize": True, "fused": True},
    {"weight_decay": 0.1, "foreach": False},
]


def assert_equal_to_torch(ours: Any, theirs: Any, options: dict[str, Any], schedule: str | None) -> None:
    runs = []
    defaults = {"lr": 0.02, "weight_decay": 0.0, **options}
    for kind in (ours, theirs):
        params = ordinary()
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.007, "weight_decay": 0.3}]
        optimizer = kind(groups, **copy.deepcopy(defaults))
        scheduler = SCHEDULES[schedule](optimizer) if schedule else None
        for step in range(20):
            drive(optimizer, params, 1, always if options.get("fused") else some, start=step)
            if scheduler:
                scheduler.step()
        runs.append(snapshot(optimizer, params))
    assert same(*runs)
    assert not torch.equal(runs[0][0], ordinary()[0]) and torch.equal(runs[0][2], ordinary()[2])


@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=str)
def test_adam_is_adamw_bit_for_bit(options: dict[str, Any]) -> None:
    assert_equal_to_torch(RiemannianAdam, torch.optim.AdamW, options, None)


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_is_sgd_bit_for_bit(options: dict[str, Any]) -> None:
    assert_equal_to_torch(RiemannianSGD, torch.optim.SGD, options, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_work_as_with_torch(schedule: str) -> None:
    """OneCycle also cycles betas and momentum."""
    assert_equal_to_torch(RiemannianAdam, torch.optim.AdamW, {}, schedule)
    assert_equal_to_torch(RiemannianSGD, torch.optim.SGD, {"momentum": 0.5}, schedule)


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_closure_runs_with_gradients_enabled(kind: Any) -> None:
    X = point(6, 3)
    optimizer = kind([X], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = X[0].sum()
        loss.backward()
        return loss

    before = X.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(before[0].sum().item()) and X[0].sum() < before[0].sum()


# On Stiefel: straight-line formulas


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0, 0, False), (0, 0.5, False), (0.9, 0, False), (0.9, 0.3, False), (0.9, 0, True)]
)  # fmt: skip
def test_sgd_on_stiefel_is_the_formula(momentum: float, dampening: float, nesterov: bool) -> None:
    """Damping belongs to the momentum buffer: without momentum torch.optim.SGD ignores it, and so must we."""
    X = point(12, 4, dtype=torch.float64)
    options: Any = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": 0.2}
    optimizer = RiemannianSGD([X], lr=0.05, **options)
    # torch.optim.SGD's direction is what it subtracts from an ordinary parameter at learning rate 1.
    shadow = nn.Parameter(torch.zeros(12, 4, dtype=torch.float64))
    theirs = torch.optim.SGD([shadow], lr=1.0, **{**options, "weight_decay": 0.0})
    Y = X.detach().numpy().copy()
    for t in range(1, 9):  # at 0 the gradient would be drawn as X was, and vanish on the tangent space
        drive(optimizer, [X], 1, seeded, start=t)
        shadow.data.zero_()
        drive(theirs, [shadow], 1, lambda *at, Y=Y: torch.from_numpy(tangent(Y, seeded(*at).numpy())), start=t)
        Y = polar_np(Y + 0.05 * shadow.detach().numpy())
    np.testing.assert_allclose(X.detach().numpy(), Y, atol=1e-12)


@pytest.mark.parametrize(("kind", "retraction", "project_every"), MOVES)
@pytest.mark.parametrize("lr", [0.03, 1e4])
def test_steps_however_violent_end_on_the_manifold_whatever_the_precision(
    kind: Any, retraction: Any, project_every: int, lr: float
) -> None:
    """Random gradients, none, one of rank one, duplicated rows, entries of 1e25; bfloat16 wherever torch may use it."""
    X = point(48, 8, retraction)
    optimizer = kind([X], lr=lr, project_every=project_every)
    rank_one = torch.outer(torch.randn(48), torch.randn(8))
    gradients = [torch.randn(48, 8), torch.zeros(48, 8), rank_one, torch.randn(1, 8).expand(48, 8), -1e3 * rank_one]
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            for step in range(31):
                X.grad = gradients[step % 5].clone() if step < 30 else torch.full((48, 8), 1e25)  # its squares overflow
                optimizer.step()
                assert torch.isfinite(X).all() and defect(X.detach()) <= 1e-6
    finally:
        torch.set_float32_matmul_precision("highest")


def test_groups_can_be_added_later() -> None:
    X, W = point(8, 3), nn.Parameter(torch.randn(3))
    optimizer = RiemannianAdam([W], lr=0.1)
    drive(optimizer, [W], 2, seeded)
    optimizer.add_param_group({"params": [X], "lr": 0.01, "second_moment": "row"})
    drive(optimizer, [W, X], 3, seeded)
    assert optimizer.state[X]["step"] == 3 and optimizer.state[W]["step"] == 5
    assert optimizer.state[X]["exp_avg_sq"].shape == (8, 1) and defect(X.detach()) <= 1e-6


# State


def test_a_pickled_model_and_optimizer_keep_their_manifolds() -> None:
    layer = nn.ParameterList([point(9, 4), nn.Parameter(torch.randn(4, 3))])
    optimizer = RiemannianAdam(layer, lr=0.1)
    drive(optimizer, list(layer), 3, seeded)
    twin, twin_optimizer = pickle.loads(pickle.dumps((layer, optimizer)))
    drive(optimizer, list(layer), 4, seeded, start=3)
    drive(twin_optimizer, list(twin), 4, seeded, start=3)
    assert same(snapshot(twin_optimizer, list(twin)), snapshot(optimizer, list(layer)))
    assert defect(twin[0].detach()) <= 1e-6
    X = twin[0]
    X.grad = torch.full_like(X, float("nan"))
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        twin_optimizer.step()


# Convergence and foreign manifolds


FOREIGN: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "sphere": (geoopt.Sphere, lambda: torch.nn.functional.normalize(torch.randn(6, dtype=torch.float64), dim=0)),
    "spheres": (geoopt.Sphere, lambda: torch.nn.functional.normalize(torch.randn(4, 6, dtype=torch.float64), dim=1)),
    "ball": (lambda: geoopt.PoincareBall(c=0.7), lambda: torch.randn(6, dtype=torch.float64) / 6),
    "balls": (lambda: geoopt.PoincareBall(c=0.7), lambda: torch.randn(4, 6, dtype=torch.float64) / 6),
    "upper half": (geoopt.UpperHalf, lambda: geoopt.UpperHalf().random(2, 2).detach().clone().as_subclass(Tensor)),
    "spd": (mt.SPD, lambda: mt.SPD().random(4, 4, dtype=torch.float64).detach().as_subclass(Tensor)),
}
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (RiemannianAdam, geoopt.optim.RiemannianAdam, {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-8}),
    "sgd": (RiemannianSGD, geoopt.optim.RiemannianSGD, {"lr": 0.05}),
    "momentum": (RiemannianSGD, geoopt.optim.RiemannianSGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (RiemannianSGD, geoopt.optim.RiemannianSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize(
    ("manifold", "pair"),
    dict.fromkeys(
        [
            *((manifold, "adam") for manifold in FOREIGN),
            ("upper half", "sgd"),
            *itertools.product(("balls", "spd"), PAIRS),
        ]
    ),
)
def test_other_manifolds_move_as_in_geoopt(manifold: str, pair: str) -> None:
    make, start = FOREIGN[manifold]
    x0 = [start(), start()]
    ours, theirs, options = PAIRS[pair]
    shared = make()
    runs = []
    for kind in (ours, theirs):
        params = [geoopt.ManifoldParameter(x.clone(), manifold=shared) for x in x0]
        optimizer = kind(params, **options)
        if kind is theirs and "momentum" in options:
            # geoopt fills the buffer with the first Euclidean gradient, not a tangent vector; start from zero instead.
            for p in params:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        drive(optimizer, params, 10, lambda step, i, p: 0.1 * seeded(step, i, p))
        runs.append([p.detach().as_subclass(Tensor) for p in params])
    for a, b, x in zip(*runs, x0, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert (a - x).norm() > 1e-3


def test_a_state_of_geoopts_sgd_loads() -> None:
    points = [geoopt.ManifoldParameter(FOREIGN["sphere"][1](), manifold=geoopt.Sphere()) for _ in range(2)]
    points[1].data.copy_(points[0])
    theirs, ours = (kind([p], lr=0.05, momentum=0.9) for kind, p in zip(PAIRS["momentum"][1::-1], points, strict=True))
    drive(theirs, points[:1], 3, seeded)
    points[1].data.copy_(points[0])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for optimizer, p in ((theirs, points[0]), (ours, points[1])):
        drive(optimizer, [p], 3, seeded)
    torch.testing.assert_close(points[1].detach().as_subclass(Tensor), points[0].detach().as_subclass(Tensor))


def test_the_state_of_a_transposed_point_loads() -> None:
    start = point(8, 3).detach()
    steps = []
    for source in (start.clone(), start.mT.contiguous().mT):
        before, after = (geoopt.ManifoldParameter(x, manifold=mt.Stiefel()) for x in (source, start.clone()))
        optimizers = [RiemannianAdam([p], lr=0.1) for p in (before, after)]
        drive(optimizers[0], [before], 2, seeded)
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        drive(optimizers[1], [after], 1, seeded)
        steps.append(after.detach())
    torch.testing.assert_close(*steps)


def test_a_state_with_amsgrad_is_refused_before_anything_changes() -> None:
    weight = nn.Parameter(torch.ones(3))
    ours, theirs = RiemannianAdam([weight], lr=0.1), torch.optim.AdamW([weight], amsgrad=True)
    for optimizer in (ours, theirs):
        drive(optimizer, [weight], 1, seeded)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match="saved with amsgrad=True, which this optimizer lacks"):
        ours.load_state_dict(theirs.state_dict())
    assert str(ours.state_dict()) == str(before)


def test_manifold_of_the_group_and_euclidean_parameters() -> None:
    X = nn.Parameter(torch.linalg.qr(torch.randn(7, 3))[0])
    optimizer = RiemannianAdam([{"params": [X], "manifold": mt.Stiefel("qr"), "names": ["mine"]}], lr=0.1)
    drive(optimizer, [X], 3, seeded)
    assert defect(X.detach()) <= 1e-6 and optimizer.state[X]["exp_avg_sq"].shape == X.shape
    flat = geoopt.ManifoldParameter(torch.randn(3), manifold=geoopt.Euclidean())
    plain = nn.Parameter(flat.detach().clone().as_subclass(Tensor))
    for kind, p in ((RiemannianAdam, flat), (torch.optim.AdamW, plain)):
        drive(kind([p], lr=0.1, weight_decay=0.1), [p], 4, seeded)
    assert torch.equal(flat.as_subclass(Tensor), plain)


# Refusals


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize(("where", "bad"), [(0, -float("inf")), (2, float("nan"))])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: Any, bad: float, where: int) -> None:
    named_error = f"parameter {('bias', '', 'second.weight')[where]} holds NaN or Inf"
    for nonfinite, warm in itertools.product(("raise", "skip"), (0, 2)):
        optimizer, params = named(kind, nonfinite=nonfinite)
        drive(optimizer, params, warm, seeded)
        before = snapshot(optimizer, params)
        with pytest.raises(ValueError, match=named_error) if nonfinite == "raise" else nullcontext():
            drive(optimizer, params, 1, with_bad(where, bad), start=warm)
        assert same(snapshot(optimizer, params), before)
        drive(optimizer, params, 1, seeded, start=warm)
        assert not torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_ignore_refuses_bad_gradients_of_points_alone(kind: Any) -> None:
    optimizer, params = named(kind, nonfinite="ignore")
    drive(optimizer, params, 2, seeded)
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"parameter second\.weight holds NaN or Inf"):
        drive(optimizer, params, 1, with_bad(2, float("nan")))
    assert same(snapshot(optimizer, params), before)
    drive(optimizer, params, 1, with_bad(0, float("nan")))  # as torch.optim, which does not look either
    assert params[0].isnan().any() and params[1].isfinite().all() and not torch.equal(params[1], before[1])


@pytest.mark.parametrize(
    ("second_moment", "size"), [("element", 1e17), ("element", 1e37), ("row", 1e25), ("matrix", 1e37)]
)
def test_a_huge_finite_gradient_moves_a_point_as_a_small_one_of_its_direction(second_moment: Any, size: float) -> None:
    """Adam's first step does not depend on the gradient's size, and its moments have to survive it."""
    results = []
    for scale in (size, 1.0):
        torch.manual_seed(3)
        params = [point(12, 4, "qr"), point(12, 4), point(700, 3)]
        optimizer = RiemannianAdam(params, lr=0.01, second_moment=second_moment)
        for i, p in enumerate(params):
            p.grad = scale * seeded(0, i, p)
        optimizer.step()
        results.append([p.detach().clone() for p in params])
        drive(optimizer, params, 3, seeded, start=1)
        for p in params:
            assert all(optimizer.state[p][key].isfinite().all() for key in ("exp_avg", "exp_avg_sq"))
            assert defect(p.detach()) <= 1e-6 and p.isfinite().all()
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_sparse_gradients_are_refused() -> None:
    W = nn.Parameter(torch.randn(5, 2))
    optimizer = RiemannianAdam([("table", W)], lr=0.1)
    W.grad = torch.ones(5, 2).to_sparse()
    with pytest.raises(ValueError, match="table has a sparse gradient"):
        optimizer.step()


BAD_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr >= 0"),
    ({"lr": torch.tensor([0.1, 0.2])}, r"lr to be a number or a one-element tensor, got \(2,\)"),
    ({"weight_decay": -0.1}, "weight_decay >= 0"),
    ({"fused": True, "foreach": True}, "fused"),
    ({"project_every": 0}, "project_every"),
    ({"nonfinite": "never"}, "raise, skip, ignore"),
]
BAD_OPTIONS: dict[Any, list[tuple[dict[str, Any], str]]] = {
    RiemannianAdam: [
        *BAD_FOR_BOTH,
        ({"eps": -1e-8}, "eps >= 0"),
        ({"params": [point(8, 3)], "eps": 0.0}, "eps > 0"),
        *(({"betas": betas}, "betas") for betas in ((0.9, 1.0), (0.9,))),
        ({"second_moment": "column"}, "element, row, matrix"),
        ({"foreach": True, "lr": torch.tensor(0.1)}, "foreach"),
    ],
    RiemannianSGD: [
        *BAD_FOR_BOTH,
        ({"momentum": -0.5}, "momentum >= 0"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs momentum"),
    ],
}


@pytest.mark.parametrize("kind", BAD_OPTIONS)
def test_bad_options_are_refused_at_construction(kind: Any) -> None:
    for options, message in BAD_OPTIONS[kind]:
        with pytest.raises(ValueError, match=message):
            kind(**{"params": [nn.Parameter(torch.zeros(3))], **options})


def test_points_that_are_none_are_refused() -> None:
    X = torch.linalg.qr(torch.randn(8, 3))[0].contiguous()
    cases: list[tuple[Tensor, Any, str]] = [
        (1.1 * X, mt.Stiefel(), "is not on Stiefel"),
        (X.flatten(), mt.Stiefel(), "FSDP1 and ZeRO-3 flatten"),
        (X.T.contiguous(), mt.Stiefel(), "tall"),
        (X.bfloat16(), mt.Stiefel(), "float32 or wider"),
        (2 * torch.ones(3), geoopt.PoincareBall(), "is not on"),
    ]
    for x, manifold, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            RiemannianAdam([{"params": [nn.Parameter(x)], "manifold": manifold, "names": ["the.weight"]}])
        assert "the.weight" in str(caught.value)


def test_a_point_that_a_cast_narrowed_is_refused_before_anything_moves() -> None:
    """A layer tied to it after the constraint casts it as any weight."""
    model = nn.ModuleList([mt.stiefel(nn.Embedding(20, 8)), nn.Linear(8, 20, bias=False), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    optimizer = RiemannianAdam(mt.optim.param_groups(model), lr=0.1)
    before = [p.detach().clone() for p in model.bfloat16().parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"weight.original is torch.bfloat16; keep points in float32"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_project_every_is_for_polar_stiefel_alone() -> None:
    sphere = geoopt.ManifoldParameter(torch.tensor([1.0, 0.0]), manifold=geoopt.Sphere())
    for p in (*(point(8, 3, r) for r in RETRACTIONS[1:]), sphere):
        with pytest.raises(ValueError, match="project_every"):
            RiemannianAdam([p], project_every=2)
        RiemannianAdam([p], project_every=1)
    RiemannianAdam([point(8, 3), nn.Parameter(torch.zeros(2))], project_every=2)


# ---- states and groups of elsewhere


OLD_STATES: dict[str, Callable[[list[Any]], Any]] = {
    "ours": lambda params: RiemannianAdam(params, lr=0.01),
    "ours, fused": lambda params: RiemannianAdam(params, lr=0.01, fused=True),
    "geoopt": lambda params: geoopt.optim.RiemannianAdam(params, lr=0.01),
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
}


@pytest.mark.parametrize(("name", "number"), list(zip(OLD_STATES, (int, float, int, float), strict=True)))
def test_a_state_with_plain_numbers_as_steps_is_continued(name: str, number: Any) -> None:
    """As older torch wrote them, and as geoopt does."""
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(point(8, 3).detach().clone())]
    if name.startswith("ours"):
        as_point(params[1])
    before = OLD_STATES[name](params)
    drive(before, params, 2, seeded)
    with torch.no_grad():
        params[1].copy_(mt.linalg.polar(params[1])[0])
    saved = copy.deepcopy(before.state_dict())
    results = []
    for convert in (number, lambda step: torch.as_tensor(step, dtype=torch.float32)):
        for state in saved["state"].values():
            state["step"] = convert(state["step"])
        copied = [nn.Parameter(p.detach().clone()) for p in params]
        after = RiemannianAdam([{"params": [copied[0], as_point(copied[1])]}])
        after.load_state_dict(copy.deepcopy(saved))
        drive(after, copied, 2, seeded, start=2)
        assert all(after.state[p]["step"] == 4 and after.state[p]["step"].dtype == torch.float32 for p in copied)
        assert defect(copied[1].detach()) <= 1e-6
        results.append(snapshot(after, copied))
    assert same(*results)


@pytest.mark.parametrize(
    ("kind", "copied"),
    [(RiemannianAdam, "load"), (RiemannianAdam, "pickle"), (RiemannianSGD, "load"), (RiemannianSGD, "deepcopy")],
)
def test_a_restored_optimizer_has_the_options_and_the_state_that_it_had(kind: Any, copied: str) -> None:
    optimizer, params = named(kind, **({"momentum": 0.9} if kind is RiemannianSGD else {}))
    drive(optimizer, params, 1, seeded)
    options, states = set(optimizer.param_groups[0]), str(optimizer.state_dict()["state"])
    if copied == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        optimizer = copy.deepcopy(optimizer) if copied == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert set(optimizer.param_groups[0]) == options and str(optimizer.state_dict()["state"]) == states
    optimizer.add_param_group({"params": [("later", nn.Parameter(torch.randn(2)))]})
    assert set(optimizer.param_groups[1]) == options - {"steps_taken"}


@pytest.mark.parametrize("copied", ["load", "deepcopy"])
def test_a_restored_optimizer_projects_at_the_steps_at_which_it_would_have(copied: str) -> None:
    def moved(stop: int) -> Tensor:
        torch.manual_seed(0)
        X = point(8, 3)
        optimizer = RiemannianAdam([X], lr=0.1, project_every=3)
        drive(optimizer, [X], stop, seeded)
        if copied == "load":
            saved, optimizer = optimizer.state_dict(), RiemannianAdam([X], project_every=3)
            optimizer.load_state_dict(saved)
        else:
            X, optimizer = copy.deepcopy((X, optimizer))
        drive(optimizer, [X], 7 - stop, seeded, stop)
        return X.detach()

    assert torch.equal(moved(0), moved(2)) and torch.equal(moved(0), moved(4))


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_a_refused_group_leaves_no_trace(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(3))], lr=0.1)
    X, plain = point(8, 3), nn.Parameter(torch.ones(8, 3))
    for group in (
        {"params": [X, plain], "manifold": mt.Stiefel()},
        {"params": [X, plain], "names": ["X"]},
        {"params": [X], "lr": "fast"},
    ):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1 and not optimizer._manifolds and len(optimizer._names) == 1
    with pytest.raises(ValueError, match="a name for each of 2 parameters, got 1"):
        optimizer.add_param_group({"params": [X, plain], "names": ["X"]})


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_steps_are_counted_in_float32_whatever_the_default_dtype(kind: Any) -> None:
    point, plain = geoopt.ManifoldParameter(torch.eye(4, 2), manifold=mt.Stiefel()), nn.Parameter(torch.ones(3))
    optimizer = kind([point, plain], lr=0.1)
    torch.set_default_dtype(torch.bfloat16)  # counts to 256
    try:
        point.grad, plain.grad = torch.ones(4, 2, dtype=torch.float32), torch.ones(3, dtype=torch.float32)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {state["step"].dtype for state in optimizer.state.values() if "step" in state} == {torch.float32}
