"""On a CUDA device: the numbers that a CPU gives, and steps that nobody waits for."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import ORTHONORMAL
from optim_cases import same
from torch import Tensor, nn

import manifold_tying as mt
from manifold_tying import PIT, kernels, linalg
from manifold_tying.models import PRESETS
from manifold_tying.optim import MergeSchedule, RiemannianAdam, param_groups
from manifold_tying.parametrizations import manifold_of
from manifold_tying.training import Settings, TrainConfig, resolve
from manifold_tying.training.build import build_merges, build_model, build_optimizer
from manifold_tying.tying import linear_cross_entropy

pytestmark = [
    pytest.mark.cuda,
    # PyTorch's own, of no consequence here: that TF32 could be switched on, and that a backward is the first to use cuBLAS
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*no current CUDA context"),
]


def skew(Y: Tensor) -> Tensor:
    A = Y[..., : Y.shape[-1], :]
    return (A - A.mT) / (4 * Y.shape[-1] ** 0.5)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "polar": lambda Y: linalg.polar(Y)[0],
    "polar, near": lambda Y: linalg.polar(torch.eye(*Y.shape[-2:], dtype=Y.dtype, device=Y.device) + 0.01 * Y)[0],
    "qr": lambda Y: linalg.orthonormalize(Y, "qr"),
    "cayley": lambda Y: linalg.cayley(skew(Y)),
    "cayley-neumann": lambda Y: linalg.cayley_neumann(skew(Y)),
    "cayley-neumann, 4 terms": lambda Y: linalg.cayley_neumann(skew(Y), 4),
}
SHAPES = ((40, 7), (200, 130), (2, 30, 8))


def value_and_gradient(function: Callable[[Tensor], Tensor], Y: Tensor) -> list[Tensor]:
    leaf = Y.clone().requires_grad_()
    X = function(leaf)
    weights = torch.linspace(-1, 1, X.numel(), dtype=X.dtype, device=X.device).view(X.shape)
    return [X.detach().cpu(), torch.autograd.grad((X * weights).sum(), leaf)[0].cpu()]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_functions(name: str, shape: tuple[int, ...]) -> None:
    Y = torch.randn(shape, dtype=torch.float64)
    here, there = (value_and_gradient(FUNCTIONS[name], Y.to(device)) for device in ("cpu", "cuda"))
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fixed", [False, True])
def test_reorthonormalization_in_place(shape: tuple[int, ...], fixed: bool) -> None:
    Y = torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0] + 0.02 * torch.randn(shape, dtype=torch.float64)
    X = linalg.reorthonormalize_(Y.cuda(), sync_free=fixed)
    torch.testing.assert_close(X.cpu(), linalg.polar(Y)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(151_936, 1024), (32_000, 2048)])
def test_vocabulary_sized_points_stay_orthonormal(shape: tuple[int, int]) -> None:
    """In float32, where a product may add all rows of YᵀY up one by one."""
    module = mt.stiefel(nn.Embedding(*shape, device="cuda"))
    Z: Any = next(module.parameters())
    optimizer = RiemannianAdam(param_groups(module), lr=0.3 / shape[0] ** 0.5, fused=True)
    for _ in range(10):
        Z.grad = torch.randn_like(Z)
        optimizer.step()
        assert linalg.defect(Z.detach()) <= 1e-6


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tf32_does_not_reach_what_decides(precision: str) -> None:
    products: Any = torch.backends.cuda.matmul
    before, Y = products.fp32_precision, torch.randn(500, 80, device="cuda")
    try:
        products.fp32_precision = precision
        plain = linalg.defect(Y @ torch.linalg.inv(torch.linalg.cholesky(Y.mT @ Y)).mT)
        found = linalg.defect(linalg.orthonormalize(Y))
        assert products.fp32_precision == precision
    finally:
        products.fp32_precision = before
    assert found <= 1e-6
    assert (plain > 1e-4) == (precision == "tf32")  # negative control


LAYERS: dict[str, Callable[[nn.Module], Any]] = {
    **{name: ORTHONORMAL[name] for name in ("stiefel", "polar", "qr", "cayley", "cayley-neumann")},
    "low rank": lambda layer: mt.low_rank(layer, rank=4),
    "equivalence": lambda layer: mt.equivalence(layer, block_size=5, terms=2),
    "equivalence, exact": lambda layer: mt.equivalence(layer, block_size=5, terms=None),
    "equivalence, full": lambda layer: mt.equivalence(layer, scheme="full", fraction=0.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_constrained_layers(name: str) -> None:
    """Output, gradients and, after a step and a merge, the weight; a few tokens and more than the layer has columns."""
    layer = LAYERS[name](nn.Linear(24, 16, dtype=torch.float64))
    for p in layer.parameters():
        if manifold_of(p) is None:  # a point stays one
            p.data += 0.01 * torch.randn_like(p)
    for tokens in (3, 200):
        x, results = torch.randn(tokens, 24, dtype=torch.float64), []
        for device in ("cpu", "cuda"):
            own: Any = copy.deepcopy(layer).to(device)
            optimizer = RiemannianAdam(param_groups(own), lr=0.01)
            y = own(x.to(device))
            y.square().sum().backward()
            gradients = [p.grad for p in own.parameters()]
            optimizer.step()
            if name.startswith("equivalence"):
                mt.merge(own)
            results.append([t.detach().cpu() for t in (y, *gradients, own.weight)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("block_size", [8, 100])
@pytest.mark.parametrize(("terms", "compiled"), [(2, False), (2, True), (4, False), (None, False)])
def test_a_real_device_runs_poet_layers_by_kernels(
    dtype: torch.dtype, bound: float, block_size: int, terms: int | None, compiled: bool
) -> None:
    """The layer against a product with its weight, which is formed without the kernels."""
    layer: Any = mt.equivalence(nn.Linear(240, 160, device="cuda"), block_size=block_size, terms=terms, seed=0)
    stored = layer.parametrizations.weight.original
    with torch.no_grad():
        stored.normal_(0, 0.02)
    x = torch.randn(3, 50, 240, device="cuda", requires_grad=True)
    weights = torch.randn(3, 50, 160, device="cuda")
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    of_expected = torch.autograd.grad((expected * weights).sum(), (x, stored))
    torch.compiler.reset()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        y = (torch.compile(layer, fullgraph=True) if compiled else layer)(x)
    of_y = torch.autograd.grad((y.float() * weights).sum(), (x, stored))
    for found, own in zip((y, *of_y), (expected, *of_expected), strict=True):
        assert torch.dist(found.float(), own) < bound * own.norm()


@pytest.mark.parametrize("interface", [mt.Untied, mt.TransposeTying, PIT])
@pytest.mark.parametrize("tokens", [20, 100])
def test_token_interfaces(interface: Any, tokens: int) -> None:
    """With fewer tokens than there are, and with more: PIT then divides the whole table."""
    on_cpu = interface(60, 12).double()
    ids, targets = (torch.randint(60, (tokens,)) for _ in range(2))
    weights = torch.randn(tokens, 12, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(on_cpu).to(device)
        e = own.embed(ids.to(device))
        loss = own.loss((e * weights.to(device)), targets.to(device))
        (loss + e.square().sum()).backward()
        gradients = [p.grad for p in own.parameters() if p.grad is not None]
        results.append([t.detach().cpu() for t in (e, loss, own.logits(e), *gradients)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("V", [60, 20_001])  # less than a block of the kernel, and some
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_in_several_chunks(dtype: torch.dtype, V: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel and by PyTorch's operations, with infinite hidden states in ignored rows."""
    monkeypatch.setattr("manifold_tying.tying._loss.GPU_CHUNK", 1000)
    if not fused:
        monkeypatch.setattr(kernels, "runs_triton", lambda x: False)
    hidden, table = (torch.randn(n, 12, dtype=dtype, device="cuda") for n in (500, V))
    targets = torch.randint(V, (500,), device="cuda")
    targets[::7] = -100
    exact = [t.double().cpu().requires_grad_() for t in (hidden, table)]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].mT, targets.cpu())
    hidden[::7] = torch.inf
    loss = linear_cross_entropy(hidden.requires_grad_(), table.requires_grad_(), targets)
    found = [loss.detach(), *torch.autograd.grad(loss, (hidden, table))]
    for a, b in zip(found, [expected.detach(), *torch.autograd.grad(expected, exact)], strict=True):
        error = torch.linalg.vector_norm(a.double().cpu() - b) / torch.linalg.vector_norm(b)
        assert error <= {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.01)


@pytest.fixture
def split_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices, too."""
    for name in ("SMALL", "LARGE_GRAM"):
        monkeypatch.setattr(f"manifold_tying.kernels._products.{name}", 0)


@pytest.mark.usefixtures("split_all")
@pytest.mark.parametrize("memory", ["free", "frozen", "trainable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_real_device_maps_in_16_bit_parts(memory: Any, dtype: torch.dtype) -> None:
    """Under autocast, to a hundredth of the rounding to bfloat16; not to that of float32, or nothing was split.

    The initial T is I, by which a product in parts is exact.
    """
    start = torch.randn(400, 48) + 2 * torch.eye(400, 48)
    pit = PIT.from_embedding(start, transform="head", memory=memory)
    exact, own = copy.deepcopy(pit).double(), pit.cuda()
    ids, hidden = torch.randperm(400)[:300], torch.randn(200, 48).to(dtype)
    with torch.autocast("cuda", torch.bfloat16):
        e, readout = own.embed(ids.cuda()), own._factors(hidden.cuda())[0]
    weights, expected = torch.randn(300, 48).bfloat16(), exact.embed(ids)
    found, own_found = (
        [x.detach(), *torch.autograd.grad((x * weights.to(x)).sum(), [p for p in m.parameters() if p.requires_grad])]
        for m, x in ((exact, expected), (own, e))
    )
    errors = [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(own_found, found, strict=True)]
    assert len(errors) == 3 if memory == "trainable" else len(errors) == 2
    assert max(errors) <= 2e-5 and min(errors[1:]) > 5e-7
    y = exact._factors(hidden.double())[0]
    assert (readout.double().cpu() - y).norm() <= {torch.float32: 2e-5, torch.float16: 5e-4}.get(dtype, 3e-3) * y.norm()


@pytest.mark.usefixtures("split_all")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_device_sums_squares_in_parts(dtype: torch.dtype) -> None:
    """With a mean, so that a sum that is rounded towards 0 would show."""
    W = (7 + 0.1 * torch.randn(9000, 72)).to(dtype)
    exact = W.double().mT @ W.double()
    assert torch.dist(kernels.split_gram(W.cuda()).cpu(), exact) <= 2e-8 * exact.norm()


def test_a_real_device_runs_triton() -> None:
    pytest.importorskip("triton")
    assert kernels.runs_triton(torch.zeros(1, device="cuda"))


# Nobody waits


@pytest.fixture
def errors_on_sync() -> Iterator[Callable[[str], None]]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_ten_fused_steps_never_wait_for_the_gpu(errors_on_sync: Callable[[str], None]) -> None:
    interface, linear = PIT(500, 32, memory="trainable"), nn.Linear(32, 32)
    model = nn.ModuleDict({"interface": interface, "linear": linear}).cuda()
    ids, targets = (torch.randint(500, (4, 16), device="cuda") for _ in range(2))

    def backward(optimizer: Any) -> None:
        optimizer.zero_grad()
        interface.loss(linear(interface.embed(ids)), targets).backward()

    def guarded(optimizer: Any) -> None:
        errors_on_sync("error")
        try:
            optimizer.step()
        finally:
            errors_on_sync("default")

    optimizer = RiemannianAdam(param_groups(model), lr=1e-2, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(10):
        backward(optimizer)
        guarded(optimizer)
    assert all(p.isfinite().all() and not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert linalg.defect(interface.memory.detach()) <= 1e-6
    # A bad gradient: masked, then reported once it has arrived.
    torch.cuda.synchronize()
    backward(optimizer)
    assert linear.weight.grad is not None
    linear.weight.grad[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    guarded(optimizer)
    torch.cuda.synchronize()
    assert same([p.detach() for p in model.parameters()], before)
    backward(optimizer)
    with pytest.raises(ValueError, match=r"linear\.weight"):
        guarded(optimizer)
    # Negative control: a step that looks at its gradients at once is seen.
    waiting = RiemannianAdam(param_groups(model), lr=1e-2)
    backward(waiting)
    with pytest.raises(RuntimeError, match="synchronizing"):
        guarded(waiting)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", LAYERS)
def test_which_constrained_layers_the_host_waits_for(name: str, errors_on_sync: Callable[[str], None]) -> None:
    layer, x = LAYERS[name](nn.Linear(24, 16)).cuda(), torch.randn(200, 24, device="cuda")
    layer(x).sum().backward()
    errors_on_sync("error")
    if name in ("polar", "qr", "cayley-neumann"):  # the last is projected by the polar factor
        with pytest.raises(RuntimeError, match="synchronizing"):
            layer(x)
        return
    layer(x).sum().backward()


BODIES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "poet-block": {"body": "poet-block", "block_size": 48},
    "poet-block, two terms": {"body": "poet-block", "cayley_terms": 2},
    "poet-full": {"body": "poet-full"},
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("interface", ["transpose", "untied", "pit-frozen", "pit-trainable", "pit-free"])
@pytest.mark.parametrize("body", BODIES)
def test_a_whole_training_step_never_waits_for_the_gpu(
    interface: Any, body: str, errors_on_sync: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward, step and the merge schedule where nothing is due, as ``manifold-tying train`` builds them."""
    monkeypatch.setitem(PRESETS, "bytes", dataclasses.replace(PRESETS["bytes"], num_layers=1))
    settings = Settings(preset="bytes", device="cuda", **BODIES[body])
    config = resolve(TrainConfig(out=Path("unused"), interface=interface, settings=settings))
    model = build_model(config)
    optimizer = build_optimizer(model, config.settings)
    schedule: MergeSchedule | None = build_merges(model, optimizer, config.settings)
    ids = torch.randint(model.interface.vocab_size, (4, 64), device="cuda")

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(ids, ids.roll(-1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss.detach()

    losses = [step()]
    errors_on_sync("error")
    losses += [step() for _ in range(3)]
    with pytest.raises(RuntimeError, match="synchronizing"):  # negative control
        losses[-1].item()
    errors_on_sync("default")
    assert losses[-1] < losses[0]


def test_a_real_device_replays_steps() -> None:
    """As CUDA graphs: the numbers of eager steps, a new learning rate, and a NaN that is left out."""
    layer, runs = mt.stiefel(nn.Linear(40, 300, device="cuda")), []
    for captured in (False, True):
        own: Any = copy.deepcopy(layer)
        params, lr = list(own.parameters()), torch.tensor(1e-2, device="cuda")
        optimizer = RiemannianAdam(param_groups(own), lr=lr, fused=True)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        step: Any = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for t in range(5):
            for i, p in enumerate(params):
                assert p.grad is not None
                p.grad.copy_(torch.linspace(-t, i + 1, p.numel()).sin().view(p.shape))
            lr.fill_(1e-2 / (t + 1))
            step()
        runs.append([p.detach().clone() for p in params])
        if captured:
            assert params[0].grad is not None
            params[0].grad.view(-1)[0] = torch.nan
            step()
            assert same([p.detach() for p in params], runs[1])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)
