"""What a step is made of: Gram matrices, G^(-1/2), points moved in place, no wait for the device."""

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from machine import peak_bytes
from matrices import conditioned, orthonormal
from optim_cases import as_point, drive, named, point, polar_np, same, seeded, snapshot, tangent, with_bad
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from manifold_tying import linalg, precision
from manifold_tying.optim import RiemannianAdam, RiemannianMuon, RiemannianSGD, adam, nonfinite

DTYPES = (torch.float32, torch.float64)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 rows, the fewest there are."""
    monkeypatch.setattr(precision, "_BLOCK_ENTRIES", 1)


# The Gram matrix


@pytest.mark.parametrize("p", [5, 191, 192, 195, 515])
def test_gram_is_the_product_by_its_transpose(p: int) -> None:
    transposed = torch.randn(p, p + 60, dtype=torch.float64).T
    sliced = torch.randn(p + 60, 2 * p + 1, dtype=torch.float64)[:, 1::2]
    for Y, dtype in itertools.product((transposed.contiguous(), transposed, sliced), DTYPES):
        G = precision.gram(Y.to(dtype))
        rounded = Y.to(dtype).double().numpy().copy()
        expected, eps = rounded.T @ rounded, torch.finfo(dtype).eps
        assert G.shape == (p, p) and G.dtype == dtype
        stacked = precision.gram(torch.stack([Y, -Y]).to(dtype))
        for result in (G, *stacked):
            np.testing.assert_allclose(result.double().numpy(), expected, rtol=0, atol=16 * eps * expected.max())
        # What is above the panels is copied; inside the blocks on the diagonal there is the product's rounding.
        width = -(-p // 4)
        assert p < 192 or torch.equal(G[:width, width:], G[width:, :width].mT)
        assert (G - G.mT).abs().max() <= 16 * eps * expected.max()


def test_gradient_of_a_wide_gram_matrix() -> None:
    Y, weights = torch.randn(200, 195, dtype=torch.float64), torch.randn(195, 195, dtype=torch.float64)
    leaf = Y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((precision.gram(leaf) * weights).sum(), leaf)
    expected = Y.numpy() @ (weights + weights.T).numpy()
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-11)


# G^(-1/2)


def one_apart(condition: float, p: int, low: bool) -> Tensor:
    """All eigenvalues of the Gram matrix alike but one, the smallest or the largest."""
    h = torch.ones(p, dtype=torch.float64)
    h[0] = condition ** (-0.5 if low else 0.5)
    return conditioned((p + 20, p), 1.0) * h


@pytest.mark.parametrize("p", [1, 6, 130])
def test_a_fixed_number_of_steps_suffices_up_to_condition_ten(p: int) -> None:
    for condition, scale in ((1.0, 1e-3), (1.3, 30.0), (10.0, 1.0)):
        for Y in (
            conditioned((p + 20, p), condition**0.5),
            one_apart(condition, p, True),
            one_apart(condition, p, False),
        ):
            Y = Y * scale
            expected = torch.from_numpy(polar_np(Y.numpy()))
            for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
                X = Y.to(dtype)
                assert linalg.reorthonormalize_(X, sync_free=True) is X
                assert linalg.defect(X) <= bound
                torch.testing.assert_close(X.double(), expected, rtol=0, atol=2 * bound)


def test_a_wide_spectrum_without_a_sync() -> None:
    """As a step of length 0.45 from a square point gives it, whose direction has independent entries: condition 16."""
    Y = torch.eye(256, dtype=torch.float64) - 0.45 / 16 * torch.randn(256, 256, dtype=torch.float64)
    h = torch.linalg.svdvals(Y)
    assert (h.max() / h.min()) ** 2 > 12
    for fixed, (dtype, bound) in itertools.product((True, False), ((torch.float32, 1e-6), (torch.float64, 1e-14))):
        X = linalg.reorthonormalize_(Y.to(dtype, copy=True), sync_free=fixed)
        assert linalg.defect(X) <= bound
        np.testing.assert_allclose(X.double().numpy(), polar_np(Y.numpy()), rtol=0, atol=2 * bound)


def test_long_steps_of_a_square_point_do_not_add_up() -> None:
    p = as_point(nn.Parameter(orthonormal(200, 200).float()))
    optimizer = RiemannianAdam([p], lr=0.03, betas=(0.0, 0.9))  # as long as 1e-2 at 2000 columns
    for t in range(200):
        before = p.detach().clone()
        drive(optimizer, [p], 1, lambda *at: seeded(*at).sign(), start=t)
        assert linalg.defect(p.detach()) <= 1e-6
    assert torch.linalg.matrix_norm(p.detach() - before, 2) > 0.4


def test_beyond_it_falls_short_and_never_over() -> None:
    """UᵀX of the polar factor U has eigenvalues between 0 and 1: such a step shortens directions and reverses none."""
    for condition in (1.0, 30.0, 300.0, 1e4, 1e6):
        Y = conditioned((70, 48), condition**0.5)
        product = torch.from_numpy(polar_np(Y.numpy())).mT @ linalg.reorthonormalize_(Y.clone(), sync_free=True)
        rounding = 1e-15 * condition
        assert (product - product.mT).abs().max() <= 1e-13 + rounding
        h = torch.linalg.eigvalsh(precision.sym(product))
        assert h.min() > 0 and h.max() <= 1 + 1e-14 + rounding
        assert h.min() < 0.9 if condition >= 1e4 else h.min() > 0.5  # and short it does fall


# Small points


@pytest.mark.parametrize("shape", [(8, 4), (256, 32), (1, 1), (30, 8, 4)])
def test_small_matrices_give_the_polar_factor_whatever_their_condition(shape: tuple[int, ...]) -> None:
    for condition, scale in itertools.product((1.0, 1.3, 1e3, 1e6, 1e9), (1e-3, 1e20)):
        Y = (scale * conditioned(shape, condition**0.5)).float()
        X = linalg.reorthonormalize_(Y.clone())
        assert linalg.defect(X).max() <= 5e-7
        expected = [polar_np(y.numpy()) for y in Y.double().view(-1, *shape[-2:])]
        # float32 entries determine the factor to their rounding times the condition of Y
        bound = 3e-7 + 1e-7 * condition**0.5
        np.testing.assert_allclose(X.double().view(-1, *shape[-2:]).numpy(), np.stack(expected), rtol=0, atol=bound)


# In place, a block of rows at a time


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("n", [256, 257, 700])
@pytest.mark.parametrize(("condition", "fixed"), [(1.1, False), (200.0, False), (8.0, True)])
def test_blocks_of_rows_give_the_polar_factor(n: int, condition: float, fixed: bool) -> None:
    assert len(precision.row_chunks(torch.zeros(n, 20))) == -(-n // 256)
    Y = conditioned((n, 20), condition**0.5)
    expected = polar_np(Y.numpy())
    for dtype, bound in ((torch.float32, 3e-7), (torch.float64, 5e-15)):
        X = Y.to(dtype, copy=True)
        where = X.data_ptr()
        assert linalg.reorthonormalize_(X, sync_free=fixed) is X and X.data_ptr() == where
        np.testing.assert_allclose(X.double().numpy(), expected, rtol=0, atol=bound)
        before = Y.to(dtype, copy=True)
        torch.testing.assert_close(linalg.reorthonormalize(before), X, rtol=0, atol=2 * bound)
        assert torch.equal(before, Y.to(dtype))  # the one that returns a new tensor leaves its argument


# Adam's step in place


LR, (B1, B2), EPS = 0.02, (0.8, 0.9), 1e-6


def adam_np(X: np.ndarray, gradients: list[np.ndarray], every: int, second_moment: str) -> tuple[np.ndarray, ...]:
    """Riemannian Adam on one matrix in float64: the point and both moments after all the gradients."""
    m = v = np.zeros(1)
    axis: Any = {"element": (), "row": 1, "matrix": (0, 1)}[second_moment]
    for t, G in enumerate(gradients, start=1):
        R = tangent(X, G) if every == 1 or t % every == 1 else G
        m, v = B1 * m + (1 - B1) * R, B2 * v + (1 - B2) * np.mean(R**2, axis=axis, keepdims=axis != ())
        X = polar_np(X - LR * m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS))
    return X, m, v


def batched_point(*shape: int) -> Any:
    return as_point(nn.Parameter(orthonormal(*shape).contiguous()))


def in_columns(p: Any) -> Any:
    """The point, stored column by column."""
    p.data = p.data.mT.contiguous().mT
    return p


POINTS: dict[str, Callable[[], list[Any]]] = {
    "three blocks": lambda: [batched_point(700, 6)],
    "whole blocks": lambda: [batched_point(512, 6)],
    "stack": lambda: [batched_point(30, 6) for _ in range(3)],
    "tall stack": lambda: [batched_point(600, 4) for _ in range(2)],
    "batch": lambda: [batched_point(5, 12, 4)],
    "batches": lambda: [batched_point(2, 3, 12, 4) for _ in range(2)],
    "mixed": lambda: [batched_point(300, 5), batched_point(20, 5), batched_point(20, 5)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "project_every": {"project_every": 3},
    "both": {"project_every": 3, "maximize": True},
}
CASES = [(points, options, "element") for points, options in zip(POINTS, itertools.cycle(OPTIONS), strict=False)]
CASES += [("three blocks", "both", "element"), ("mixed", "plain", "row"), ("batch", "maximize", "row")]
CASES += [("batch", "plain", "matrix"), ("stack", "both", "matrix")]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("points", "options", "second_moment"), CASES)
def test_adam_is_the_formula(points: str, options: str, second_moment: Any) -> None:
    params, chosen, steps = POINTS[points](), OPTIONS[options], 5
    start = [p.detach().clone() for p in params]
    shared: dict[str, Any] = {"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": 0.3}
    optimizer = RiemannianAdam(params, second_moment=second_moment, **shared, **chosen)
    late = (0, 1, 0)  # the second point moves a step later, and its step count differs
    drive(optimizer, params, steps, lambda t, i, p: seeded(t, i, p) if t >= late[i] else None)
    sign = -1.0 if chosen.get("maximize") else 1.0
    for i, p in enumerate(params):
        n, d = p.shape[-2:]
        gradients = [sign * seeded(t, i, p).view(-1, n, d).numpy() for t in range(late[i], steps)]
        state = optimizer.state[p]
        how = chosen.get("project_every", 1), second_moment
        matrices = start[i].view(-1, n, d).numpy()
        results = [adam_np(X, [G[k] for G in gradients], *how) for k, X in enumerate(matrices)]
        found = p.detach(), state["exp_avg"], state["exp_avg_sq"]
        for ours, expected in zip(found, map(np.stack, zip(*results, strict=True)), strict=True):
            # five steps of float64 rounding; the fused kernel takes the bias corrections' powers in double as numpy does
            np.testing.assert_allclose(ours.reshape(expected.shape).numpy(), expected, rtol=0, atol=1e-11)
        assert state["step"] == len(gradients)


def test_a_point_that_is_not_contiguous_moves_alike() -> None:
    theirs = batched_point(30, 4)
    ours = in_columns(as_point(nn.Parameter(theirs.detach().clone())))
    assert not ours.is_contiguous() and theirs.is_contiguous()
    for p in (ours, theirs):
        drive(RiemannianAdam([p], lr=0.05), [p], 4, lambda *at: seeded(*at).T.contiguous().T)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_blocked_step_holds_no_second_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_BLOCK_ENTRIES", 2**14)
    V, d = 50_000, 16
    table = V * d * 4
    peaks = {}
    for second_moment in ("element", "row"):
        X = point(V, d)
        optimizer = RiemannianAdam([X], lr=0.01, second_moment=second_moment, project_every=2)
        drive(optimizer, [X], 1, seeded)  # which allocates the moments
        X.grad = seeded(1, 0, X)
        peaks[second_moment] = [peak_bytes(optimizer.step), peak_bytes(optimizer.step)]  # with and without projection
    assert all(0 < peak < table / 2 for peak in peaks["element"])
    assert all(peak > table for peak in peaks["row"])  # negative control


# Gradients that are not finite, found without waiting


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays a device that the host runs ahead of; what it copies has then arrived at once."""
    monkeypatch.setattr(adam, "SYNC_FREE_DEVICES", ("cpu",))


def tables_and_moments(optimizer: Any, params: list[Any]) -> list[Tensor]:
    moments = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    return [t.detach().clone() for t in [*params, *moments]]


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize(("bad", "where", "warm"), [(np.nan, 0, 1), (np.inf, 1, 3), (-np.inf, 2, 1)])
def test_a_bad_gradient_is_masked_then_reported(bad: float, where: int, warm: int) -> None:
    optimizer, params = named(RiemannianAdam, fused=True)
    drive(optimizer, params, warm, seeded)
    before = tables_and_moments(optimizer, params)
    drive(optimizer, params, 1, with_bad(where, bad), start=warm)  # nothing is raised yet
    assert same(tables_and_moments(optimizer, params), before)
    whole = snapshot(optimizer, params)
    name = ("bias", "first.weight", "second.weight")[where]
    with pytest.raises(ValueError, match=f"at an earlier step the gradient of parameter {name} holds NaN or Inf"):
        drive(optimizer, params, 1, seeded, start=warm)
    assert same(snapshot(optimizer, params), whole)
    drive(optimizer, params, 2, seeded, start=warm)  # and training goes on
    for p, b in zip(params, before, strict=False):
        assert p.isfinite().all() and not torch.equal(p, b)
    assert all(linalg.defect(p.detach()) <= 1e-6 for p in params[1:])


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("which", ["ordinary", "points"])
def test_skipped_steps_do_not_count(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is left out on the device is the same as one that the host leaves out, bias corrections included."""
    results = []
    for ahead in (("cpu",), ()):
        monkeypatch.setattr(adam, "SYNC_FREE_DEVICES", ahead)
        torch.manual_seed(0)
        optimizer, params = named(RiemannianAdam, fused=True, nonfinite="skip")
        drive(optimizer, params, 2, with_bad(1, float("nan")))
        drive(optimizer, params, 3, seeded)
        chosen = params[:1] if which == "ordinary" else params[1:]
        results.append([p.detach() for p in chosen] + [optimizer.state[p]["step"] for p in chosen])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("deferred")
def test_now_and_then_a_step_waits_and_projects_whatever_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SYNC_EVERY", 3)
    X, on = point(40, 40), []
    optimizer = RiemannianAdam([X], lr=100.0, fused=True)
    for t in range(3):
        drive(optimizer, [X], 1, seeded, start=t)
        on.append(bool(linalg.defect(X.detach()) <= 1e-6))
    assert on == [False, False, True]


CANNOT_RUN_AHEAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "second moment by row": (lambda: [point(8, 3)], {"second_moment": "row", "fused": True}),
    "not fused": (lambda: [point(8, 3)], {}),
    "another retraction": (lambda: [point(8, 3, "qr")], {"fused": True}),
    "too wide": (lambda: [point(20, 9)], {"fused": True}),
    "scale": (lambda: [point(8, 3)], {"fused": True, "scale": torch.ones(3)}),
    "columns in memory": (lambda: [in_columns(point(8, 3))], {"fused": True}),
}


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("case", CANNOT_RUN_AHEAD)
def test_what_cannot_run_ahead_raises_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SYNC_FREE_MAX_COLUMNS", 8)
    make, options = CANNOT_RUN_AHEAD[case]
    params = make()
    before = params[0].detach().clone()
    optimizer = RiemannianAdam([{"params": params, **options}], lr=0.01)
    with pytest.raises(ValueError, match="the gradient of parameter 0"):
        drive(optimizer, params, 1, with_bad(0, float("nan")))
    assert torch.equal(params[0], before)


# Captured steps


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a CUDA graph records what the device that the CPU plays is told to do."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_build_for_cuda_without_a_gpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is an error of the driver."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", MagicMock(side_effect=RuntimeError("no driver")))
    optimizer, params = named(RiemannianAdam)
    drive(optimizer, params, 1, seeded)


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_captured_step_is_masked_and_reads_nothing(lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[Tensor]] = []
    for captured in (False, True):
        torch.manual_seed(0)
        optimizer, params = named(RiemannianAdam, fused=True)
        optimizer.param_groups[0]["lr"] = lr
        drive(optimizer, params, 1, seeded)
        if captured:
            capture(monkeypatch)
            before = snapshot(optimizer, params)
            drive(optimizer, params, 2, with_bad(1, float("nan")), start=1)
            assert same(snapshot(optimizer, params), before)
        drive(optimizer, params, 2, seeded, start=1)
        optimizer.state_dict()
        runs.append([p.detach() for p in params])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("deferred")
def test_a_captured_step_depends_on_no_count_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SYNC_EVERY", 2)
    X = point(40, 40)
    optimizer = RiemannianAdam([X], lr=1.0, project_every=2, fused=True)
    drive(optimizer, [X], 1, seeded)
    before, state = X.detach().clone(), copy.deepcopy(optimizer.state_dict())
    capture(monkeypatch)
    moved = []
    for _ in range(2):  # in the first of which the host would sync, and not project
        with torch.no_grad():
            X.copy_(before)
        optimizer.state[X].update({key: value.clone() for key, value in state["state"][0].items()})
        drive(optimizer, [X], 1, seeded, start=1)
        moved.append(X.detach().clone())
    assert torch.equal(*moved) and linalg.defect(moved[0]) > 1e-6


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize(("steps", "options"), [(0, {"fused": True}), (1, {"fused": False})])
def test_what_cannot_be_captured_is_refused(
    steps: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, params = named(RiemannianAdam, **options)
    drive(optimizer, params, steps, seeded)
    capture(monkeypatch)
    with pytest.raises(ValueError, match=r"without a sync .* and one before the capture"):
        drive(optimizer, params, 1, seeded)


# Compiled steps

MAKERS: dict[str, Callable[..., Any]] = {
    "element": lambda params, **options: RiemannianAdam(params, **options),
    "fused": lambda params, **options: RiemannianAdam(params, fused=True, **options),
    "momentum": lambda params, **options: RiemannianSGD(params, momentum=0.9, **options),
    "muon": lambda params, **options: RiemannianMuon(params, dual_steps=1, **options),
}


def run_steps(make: Callable[..., Any], compiled: bool, **options: Any) -> tuple[list[Tensor], int]:
    """Parameters after steps with as many learning rates, and how many graphs were compiled on the way."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    params = [point(12, 4), nn.Parameter(torch.randn(5, 3))]
    if make is MAKERS["element"]:
        params.append(point(12, 4))  # moved with the first one as a stack
    backend = CompileCounterWithBackend("eager")
    optimizer = make(params, lr=torch.tensor(0.02), **options)
    step = torch.compile(optimizer.step, fullgraph=True, backend=backend) if compiled else optimizer.step
    for t in range(5):
        for i, p in enumerate(params):
            p.grad = seeded(t, i, p)
        for group in optimizer.param_groups:
            group["lr"].fill_(0.02 / (t + 1))
        step()
    return [p.detach() for p in params], backend.frame_count


@pytest.mark.parametrize("name", MAKERS)
def test_a_compiled_step_is_the_eager_one_whatever_the_learning_rate(name: str) -> None:
    """And it projects always."""
    now_and_then = {"project_every": 2} if name == "element" else {}
    eager, none = run_steps(MAKERS[name], compiled=False)
    ours, graphs = run_steps(MAKERS[name], compiled=True, **now_and_then)
    assert none == 0 and 1 <= graphs <= 2  # the first step makes the state
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert all(linalg.defect(p) <= 1e-6 for p in ours[::2])
    if now_and_then:  # negative control: it would be seen
        others, _ = run_steps(MAKERS[name], compiled=False, **now_and_then)
        assert all((a - b).abs().max() > 1e-4 for a, b in zip(ours[::2], others[::2], strict=True))


@pytest.mark.usefixtures("deferred")
def test_a_nan_of_the_last_step_is_reported_when_the_state_is_saved() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = RiemannianAdam([p], lr=0.1, fused=True)
    p.grad = torch.full((3,), float("nan"))
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))
    with pytest.raises(ValueError, match="at an earlier step the gradient of parameter 0 of group 0"):
        optimizer.state_dict()


def test_a_check_waits_for_the_device_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for the current one, where several are in use."""
    bad, event = MagicMock(is_cuda=True, device="cuda:1"), MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    nonfinite.NonFiniteGuard("raise").check(["p"], [torch.ones(3)], deferred=True, reduce=lambda _: bad)
    event.record.assert_called_once_with("cuda:1")
