"""Shapes without values: the meta device, FakeTensorMode, and the tools that stand on them."""

from collections.abc import Callable
from typing import Any

import geoopt
import pytest
import torch
from layers import stored
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from manifold_tying import PIT, TransposeTying, constrain, equivalence, isospectral, low_rank, orthogonal, spd, stiefel
from manifold_tying.parametrizations import materialize

V, D = 50, 8

MODELS: dict[str, Callable[[], nn.Module]] = {
    "polar": lambda: orthogonal(nn.Linear(D, 12)),
    "qr, wide": lambda: orthogonal(nn.Linear(D, 4), map="qr"),
    "cayley": lambda: orthogonal(nn.Linear(D, 12), map="cayley"),
    "cayley-neumann": lambda: orthogonal(nn.Linear(D, D), map="cayley-neumann"),
    "stiefel": lambda: stiefel(nn.Linear(D, 12)),
    "low rank": lambda: low_rank(nn.Linear(D, 12), rank=2),
    "isospectral": lambda: isospectral(nn.Linear(D, 12)),
    "spd": lambda: spd(nn.Linear(D, D), "weight"),
    "equivalence": lambda: equivalence(nn.Linear(D, 12), block_size=4, terms=2),
    "equivalence, exact": lambda: equivalence(nn.Linear(D, 12), block_size=4, terms=None),
    "equivalence, full": lambda: equivalence(nn.Linear(D, 12), scheme="full", block_size=4),
    "equivalence, drawn": lambda: equivalence(nn.Linear(D, 12), block_size=4, init="uniform-spectrum", seed=0),
    "transpose tying": lambda: TransposeTying(V, D),
    "PIT": lambda: PIT(V, D, memory="frozen"),
    "PIT, free": lambda: PIT(V, D),
    "PIT, trainable": lambda: PIT(V, D, memory="trainable"),
}
every_model = pytest.mark.parametrize("name", MODELS)


def output(model: Any, device: str, tokens: int = 6) -> Tensor:
    """Something that a model computes from each of its inputs."""
    if hasattr(model, "embed"):
        # Distinct: an eager lookup solves for each token once.
        ids = torch.arange(tokens, device=device).view(2, -1)
        hidden = model.embed(ids).tanh()
        return model.loss(hidden, ids) + model.logits(hidden).mean()
    x = torch.linspace(-1, 1, tokens * D, device=device).view(tokens, D)
    return model(x).square().mean()


def step(model: nn.Module, device: str, tokens: int = 6) -> None:
    loss = output(model, device, tokens)
    assert loss.shape == () and loss.dtype == torch.float32
    loss.backward()
    for key, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype), key


@every_model
def test_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for tokens in (6, V - 2 if hasattr(model, "embed") else 400):
        step(model, "meta", tokens)
    moved = MODELS[name]().to("meta")
    step(moved, "meta")


@every_model
def test_up_from_the_meta_device(name: str) -> None:
    real = MODELS[name]()
    with torch.no_grad():
        for p in real.parameters():
            if not name.startswith(("stiefel", "low", "iso", "PIT")):
                p.add_(0.1 * torch.randn_like(p))
    for assign in (False, True):
        with torch.device("meta"):
            model = MODELS[name]()
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(real.state_dict(), assign=assign)
        model.to("cpu")
        assert torch.equal(output(model, "cpu"), output(real, "cpu"))
        step(model, "cpu")


def test_an_equivalence_from_the_meta_device_without_a_state() -> None:
    real, model = (equivalence(nn.Linear(8, 8, device=d), block_size=4, seed=3) for d in ("cpu", "meta"))
    model.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(model.weight).all()
    for name, buffer in real.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer) or name.endswith("ordered_base")


def test_the_tensors_of_a_manifold_are_kept_or_unknown() -> None:
    ball = geoopt.PoincareBall(c=0.5)
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    constrain(layer, "weight", ball).to_empty(device="cpu").reset_parameters()
    assert float(ball.c) == pytest.approx(0.5)
    layer.to("meta").to_empty(device="cpu")
    with pytest.raises(ValueError, match="to know its isp_c, got NaN"):
        layer.reset_parameters()


def test_an_assigned_state_brings_the_dtype_of_W0() -> None:
    real = equivalence(nn.Linear(8, 8).bfloat16(), block_size=4)
    with torch.device("meta"):
        model = equivalence(nn.Linear(8, 8), block_size=4)
    model.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(model(x), real(x)) and model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@every_model
def test_an_assigned_state_brings_its_dtype(name: str, dtype: torch.dtype) -> None:
    state = {key: t.to(dtype) if t.is_floating_point() else t for key, t in MODELS[name]().state_dict().items()}
    with torch.device("meta"):
        assigned = MODELS[name]()
    assigned.load_state_dict(state, assign=True)
    copied = MODELS[name]().to(dtype)  # 16-bit layers store float32
    copied.load_state_dict(state)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(output(assigned, "cpu"), output(copied, "cpu"))
    finally:
        torch.set_default_dtype(before)
    assert [p.dtype for p in assigned.parameters()] == [p.dtype for p in copied.parameters()]


@pytest.mark.parametrize("name", ["PIT", "PIT, free", "PIT, trainable"])
def test_loading_keeps_the_dtype_of_embeddings(name: str) -> None:
    pit: Any = MODELS[name]().double().half()
    pit.load_state_dict(pit.state_dict())
    assert pit.embed(torch.arange(3)).dtype == torch.float16


@every_model
def test_type_casts_no_indices(name: str) -> None:
    model = MODELS[name]()
    integers = [key for key, t in model.state_dict().items() if not t.is_floating_point()]
    model.type(torch.bfloat16)
    assert [key for key, t in model.state_dict().items() if not t.is_floating_point()] == integers
    model.type(torch.float32)
    step(model, "cpu")


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and traces branches on values
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("polar", "stiefel", "equivalence"))])
def test_traced_by_torch_jit(name: str) -> None:
    model, x = MODELS[name](), torch.randn(6, D)
    traced: Any = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("map", ["polar", "qr", "cayley", "cayley-neumann"])
def test_uninitialized_numbers_are_not_read(map: Any) -> None:
    with torch.device("meta"):
        layer = orthogonal(nn.Linear(8, 8), map=map)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        stored(layer).fill_(torch.nan)
    layer.reset_parameters()
    assert layer.weight.isfinite().all()


@every_model
def test_under_fake_tensors(name: str) -> None:
    for low in (False, True):
        with FakeTensorMode():
            model = MODELS[name]()
            assert all(isinstance(p, FakeTensor) for p in model.parameters())
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = output(model, "cpu")
            loss.backward()
            assert all(isinstance(p.grad, FakeTensor) for p in model.parameters() if p.requires_grad)


@every_model
def test_operations_are_counted_without_values_as_with_them(name: str) -> None:
    counts = []
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.enable_grad():
            model = MODELS[name]()
            with FlopCounterMode(display=False) as counter:
                step(model, "cpu")
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_real_model_is_still_real() -> None:
    # Negative control: whatever looks for missing values must not take a tensor subclass or a parameter for fake.
    layer = orthogonal(nn.Linear(D, 12))
    with pytest.raises(ValueError, match="finite"):
        layer.weight = torch.full((12, D), torch.nan)
    step(materialize(layer), "cpu")
