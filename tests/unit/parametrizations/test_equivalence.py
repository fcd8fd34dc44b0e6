"""Orthogonal equivalence against dense float64 constructions of R, W0 and P, written out anew."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from layers import Stack, assert_one_graph, stored
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from manifold_tying import Untied, equivalence, equivalence_, materialize, merge, orthogonal
from manifold_tying.models import Llama, preset
from manifold_tying.poet import Equivalence, both_blocks, columns
from manifold_tying.poet.linear import linear_flops, poet_linear, prefers_input_centric
from manifold_tying.poet.spec import BlockSpec, RotationSpec

LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tall": (lambda: nn.Linear(5, 9), "weight"),
    "wide": (lambda: nn.Linear(9, 5, bias=False), "weight"),
    "embedding": (lambda: nn.Embedding(11, 4), "weight"),
    "conv": (lambda: nn.Conv2d(2, 4, 3), "weight"),
    "conv1d": (lambda: nn.Conv1d(2, 8, 3), "weight"),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), "in_proj_weight"),
    "stack": (Stack, "weight"),
}
SCHEMES: dict[str, dict[str, Any]] = {
    "block": {"block_size": 3},
    "larger than the layer": {"block_size": 64},
    "full": {"scheme": "full", "block_size": 3},
    "fraction": {"scheme": "full", "fraction": 0.5},
    "two terms": {"block_size": 4, "terms": 2},
    "three terms": {"block_size": 4, "terms": 3},
    "only R": {"block_size": 3, "out_share": 1.0},
    "only P": {"block_size": 3, "out_share": 0.0},
}
# A layout and a rotation never meet: each layer has one scheme, and each scheme a plain layer.
PAIRS = dict.fromkeys([*zip(LAYERS, SCHEMES, strict=False), *(("tall", scheme) for scheme in SCHEMES)])
every_pair = pytest.mark.parametrize(("layer", "scheme"), PAIRS)


def constraint(module: Any, name: str = "weight") -> Any:
    part = module.parametrizations[name][0]
    assert isinstance(part, Equivalence)
    return part


def turn(module: nn.Module, name: str = "weight", size: float = 0.02) -> None:
    """Away from the identity."""
    with torch.no_grad():
        stored(module, name).normal_(std=size)


def dense_factor(vector: Tensor, order: Tensor, n: int, b: int, terms: int | None) -> Tensor:
    """R (n, n) from its skew vector, differentiable: explicit permutation matrix, block diagonal, inverse or series."""
    blocks = []
    start, covered = 0, len(order)
    while covered:
        size = min(b, covered)
        upper = torch.zeros(size, size, dtype=vector.dtype)
        entries = list(itertools.combinations(range(size), 2))
        if entries:
            i, j = torch.tensor(entries).T
            upper = upper.index_put((i, j), vector[start : start + len(entries)])
        start, covered = start + len(entries), covered - size
        A, eye = upper - upper.T, torch.eye(size, dtype=vector.dtype)
        if terms is None:
            blocks.append((eye + A) @ torch.linalg.inv(eye - A))
        else:
            blocks.append((eye + A) @ sum((torch.linalg.matrix_power(A, i) for i in range(1, terms + 1)), eye))
    assert start == len(vector)
    D = torch.block_diag(*blocks, torch.eye(n - len(order), dtype=vector.dtype))[:n, :n]
    others = [i for i in range(n) if i not in order.tolist()]
    Psi = torch.eye(n, dtype=vector.dtype)[[*order.tolist(), *others]]
    return Psi.T @ D @ Psi


def dense_sides(module: nn.Module, vector: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """R and P in the vector's dtype; the block sizes are read off the description, ``rows=9/9 by 3``."""
    part = constraint(module, name)
    m, n = part.ordered_base.shape[-2:]
    b_R, b_P = (int(words.split(" by ")[1].split(",")[0]) for words in part.extra_repr().split("=")[1:3])

    def pairs(order: Tensor, b: int) -> int:
        k, r = divmod(len(order), b)
        return k * b * (b - 1) // 2 + r * (r - 1) // 2

    (_, rows), (_, columns) = part.sides(vector)
    size_R = pairs(rows, b_R)
    assert len(vector) == size_R + pairs(columns, b_P)
    R = dense_factor(vector[:size_R], rows, m, b_R, part.spec.terms)
    P = dense_factor(vector[size_R:], columns, n, b_P, part.spec.terms)
    return R, P


def dense_weight(module: nn.Module, vector: Tensor, name: str = "weight") -> Tensor:
    """R W0 P in the vector's dtype, in the layer's shape."""
    part = constraint(module, name)
    W0 = part.base.to(vector.dtype)
    if module.__class__.__name__.endswith(("Conv1d", "Conv2d")):
        W0 = W0.flatten(1)
    if W0.ndim == 2:
        R, P = dense_sides(module, vector, name)
        return (R @ W0 @ P).view(part.base.shape)
    return torch.stack([R @ W @ P for W, v in zip(W0, vector, strict=True) for R, P in [dense_sides(module, v, name)]])


def build(layer: str, scheme: str, **options: Any) -> tuple[Any, str]:
    make, name = LAYERS[layer]
    return equivalence(make(), name, **(SCHEMES[scheme] | options)), name


# ---- the map


@every_pair
def test_the_weight_and_its_gradient_are_those_of_the_dense_product(layer: str, scheme: str) -> None:
    make, name = LAYERS[layer]
    module = make()
    plain = getattr(module, name).detach().clone()
    equivalence(module, name, **SCHEMES[scheme], seed=3)
    assert torch.equal(getattr(module, name), plain)  # it starts from the identity
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-12)):  # the latter with the orders after a merge
        if dtype == torch.float64:
            merge(module.double())
        turn(module, name, 0.02 if dtype == torch.float32 else 0.1)
        vector = stored(module, name).detach().double().requires_grad_()
        expected, got = dense_weight(module, vector, name), getattr(module, name)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound)
        assert got.shape == plain.shape and (got - constraint(module, name).base).abs().max() > 1e-3
        C = torch.randn_like(got)
        (gradient,) = torch.autograd.grad((got * C).sum(), stored(module, name))
        (wanted,) = torch.autograd.grad((expected * C).sum(), vector)
        torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=10 * bound)
        assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize(("scheme", "bias"), [("block", False), *((scheme, True) for scheme in SCHEMES)])
@pytest.mark.parametrize("input_centric", [True, False])
def test_the_linear_layer_and_its_gradients(
    scheme: str, input_centric: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_CHUNK_TOKENS", 4)  # ten tokens are processed in blocks of 4, 4 and 2
    module: Any = equivalence(nn.Linear(9, 7, bias=bias), **SCHEMES[scheme]).double()
    turn(module, size=0.1)
    part, vector = constraint(module), stored(module)
    x = torch.randn(2, 5, 9, dtype=torch.float64, requires_grad=True)
    places = part.out_places, part.in_places
    y = poet_linear(x, part.ordered_base, vector, part.spec, places, module.bias, input_centric=input_centric)
    C = torch.randn_like(y)
    leaves = [x, vector, module.bias] if bias else [x, vector]
    dense = F.linear(x, dense_weight(module, vector), module.bias)
    torch.testing.assert_close(y, dense, rtol=0, atol=1e-12)
    for found, wanted in zip(torch.autograd.grad(y, leaves, C), torch.autograd.grad(dense, leaves, C), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ---- sizes


# scheme and block size or fraction: millions of parameters of the 60M, 130M, 350M and 1.3B models. The paper prints 118.26
# for the last of BS b=256, which no choice of its widths gives.
TABLE_2: dict[tuple[str, float], list[float]] = {
    ("block", 64): [2.39, 5.52, 14.90, 29.22],
    ("block", 128): [4.81, 11.12, 30.04, 58.91],
    ("block", 256): [9.66, 22.33, 60.32, 118.29],
    ("full", 1 / 8): [0.53, 1.78, 6.34, 25.39],
    ("full", 1 / 4): [2.13, 7.13, 25.44, 101.66],
    ("full", 1 / 2): [8.54, 28.56, 101.86, 406.88],
}


@pytest.mark.parametrize(("family", "scheme"), [("poet", "block"), ("galore", "full")])
def test_parameter_counts_of_the_papers_table_2(family: str, scheme: Any) -> None:
    for i, model in enumerate(("60m", "130m", "350m", "1.3b")):
        config = preset(f"{family}-{model}")
        with torch.device("meta"):
            body = Llama(config, Untied(config.vocab_size, config.hidden_size)).blocks
        layers = [layer for layer in body.modules() if isinstance(layer, nn.Linear)]
        for size, expected in ((size, counts[i]) for (name, size), counts in TABLE_2.items() if name == scheme):
            b, fraction = (int(size), None) if scheme == "block" else (256, size)
            found = (
                RotationSpec.of(layer.out_features, layer.in_features, scheme, b, fraction, None) for layer in layers
            )
            assert round(sum(spec.num_params for spec in found) / 1e6, 2) == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("input_centric", [True, False])
def test_the_operations_of_a_layer_are_those_that_torch_counts(input_centric: bool, training: bool) -> None:
    module = equivalence(nn.Linear(16, 32, bias=False), block_size=4)
    part, vector, x = constraint(module), stored(module), torch.randn(7, 16, requires_grad=training)
    spec, places = part.spec, (part.out_places, part.in_places)

    def counted(run: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            y = run()
            if training:
                y.sum().backward()
        return counter.get_total_flops()

    layer = counted(lambda: poet_linear(x, part.ordered_base, vector, spec, places, input_centric=input_centric))
    maps = counted(lambda: torch.cat([G for side in both_blocks(spec, vector) for G in side]))
    assert layer - maps == linear_flops(7, spec, input_centric=input_centric, training=training)


@pytest.mark.parametrize("scheme", ["block", "full"])
def test_a_share_divides_the_same_budget(scheme: Any) -> None:
    module = equivalence(nn.Linear(64, 64), scheme=scheme, block_size=8, out_share=0.25)
    whole = stored(equivalence(nn.Linear(64, 64), scheme=scheme, block_size=8)).numel()
    assert stored(module).numel() == pytest.approx(whole, rel=0.15)
    assert constraint(module).spec.R.num_params == pytest.approx(0.25 * whole, abs=0.15 * whole)


# ---- the spectrum


def singular_values(weight: Tensor) -> np.ndarray:
    return scipy.linalg.svdvals(weight.detach().double().numpy())


@pytest.mark.parametrize(("terms", "bound"), [(None, 1e-12), (2, 1e-6), (3, 1e-3)])
def test_singular_values_stay_through_training_and_merges(terms: int | None, bound: float) -> None:
    x, target = torch.randn(32, 12, dtype=torch.float64), torch.randn(32, 9, dtype=torch.float64)

    def train(module: Any) -> float:
        before = singular_values(module.weight)
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
        losses = []
        for i in range(30):
            optimizer.zero_grad()
            loss = (module(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if i % 10 == 9:
                merge(module)
        assert losses[-1] < losses[0]
        return float(np.abs(singular_values(module.weight) - before).max())

    layer = nn.Linear(12, 9, dtype=torch.float64)
    assert train(equivalence(copy.deepcopy(layer), block_size=4, terms=terms)) < bound
    assert train(layer) > 5e-3  # plain gradient steps change them


def test_the_default_keeps_the_spectrum_however_far_it_trains() -> None:
    def train(**options: Any) -> tuple[float, float]:
        torch.manual_seed(0)
        module: Any = equivalence(nn.Linear(8, 8, dtype=torch.float64), block_size=4, **options)
        before, x, target = singular_values(module.weight), *torch.randn(2, 32, 8, dtype=torch.float64)
        optimizer = torch.optim.Adam(module.parameters(), lr=3e-2)
        for _ in range(100):
            optimizer.zero_grad()
            (module(x) - target).square().mean().backward()
            optimizer.step()
        return float(np.abs(singular_values(module.weight) - before).max()), stored(module).abs().max().item()

    drift, entry = train()
    assert entry > 0.8 and drift < 1e-12
    assert train(terms=2)[0] > 1e-2  # the paper's series does not


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_initial_weights(shape: tuple[int, int]) -> None:
    n, m = shape

    def initial(init: Any, size: int = 1) -> Tensor:
        return equivalence(nn.Linear(n * size, m * size), init=init, seed=4).weight.detach().double()

    np.testing.assert_allclose(initial("normalized").norm(dim=1), 1, atol=1e-6)
    np.testing.assert_allclose(singular_values(initial("uniform-spectrum")), 1, atol=1e-6)
    assert initial("standard", 20).std().item() == pytest.approx(0.02, rel=0.03)
    assert initial("xavier", 20).std().item() == pytest.approx((2 / (20 * (m + n))) ** 0.5, rel=0.03)
    assert torch.equal(initial("xavier"), initial("xavier"))
    kernel = equivalence(nn.Conv2d(2, 4, 3), init="normalized").weight
    np.testing.assert_allclose(kernel.detach().flatten(1).norm(dim=1), 1, atol=1e-6)


# ---- merging


def test_an_assigned_weight_is_kept_as_it_is_or_refused() -> None:
    module: Any = equivalence(nn.Linear(5, 9), block_size=3)
    turn(module)
    value = torch.randn(9, 5)
    module.weight = value
    assert torch.equal(module.weight, value) and stored(module).abs().max() == 0
    for wrong in (torch.full_like(value, torch.nan), value.flatten()):
        with pytest.raises(ValueError, match=r"finite|shape"):
            module.weight = wrong
        assert torch.equal(module.weight, value)


@every_pair
def test_a_merge_leaves_the_weight_and_starts_anew(layer: str, scheme: str) -> None:
    module, name = build(layer, scheme)
    vector, part = stored(module, name), constraint(module, name)
    orders = {str([part.out_places, part.in_places])}
    for count in range(1, 4):
        turn(module, name)
        before = getattr(module, name).detach().clone()
        vector.grad = torch.ones_like(vector)
        assert merge(module) == 1
        after = getattr(module, name).detach()
        assert ((after - before).norm() / before.norm()).item() < 1e-6
        assert torch.equal(part.base, after)
        assert stored(module, name) is vector and vector.abs().max() == 0 and vector.grad is None
        assert part.merges == count
        orders.add(str([part.out_places, part.in_places]))
    assert len(orders) > 2  # small ones may come again by chance


def test_merge_reaches_everything_below_and_keeps_the_optimizers_keys() -> None:
    model = nn.Sequential(
        equivalence(nn.Linear(4, 4), block_size=2), nn.Sequential(equivalence(nn.Conv1d(2, 3, 2))), nn.Linear(4, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(3, 4)
    model[0](x).square().sum().backward()
    optimizer.step()
    state = optimizer.state[stored(model[0])]
    assert merge(model) == 2
    assert optimizer.state[stored(model[0])] is state
    assert merge(nn.Linear(2, 2)) == 0


def test_orders_come_from_the_seed_and_the_count() -> None:
    def orders(seed: int | None, merges: int) -> str:
        torch.randn(merges)  # the global generator has no say
        module = equivalence(nn.Linear(30, 20), block_size=4, seed=seed)
        for _ in range(merges):
            with torch.device("meta"):  # they are drawn on the CPU
                merge(module)
        return str([constraint(module).out_places.tolist(), constraint(module).in_places.tolist()])

    assert orders(1, 2) == orders(1, 2)
    assert len({orders(seed, merges) for seed in (1, 2, None, None) for merges in range(3)}) == 12
    assert BlockSpec(9, 3, 3).sample_permutation(7, 0, "out")[:3].tolist() == [
        2,
        5,
        4,
    ]  # fixed for all processes and runs


# Of the first block of R and of the last one of P.
@pytest.mark.parametrize(("terms", "entry", "deviation"), [(2, 0, 0.9**6), (3, -1, 2 * 0.9**4 - 0.9**8), (None, 0, 0)])
def test_merge_warns_of_large_skew_matrices(terms: int | None, entry: int, deviation: float) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    equivalence_(model, block_size=3, terms=terms, verbose=False)
    with torch.no_grad():
        stored(model[1])[entry] = 0.02 if terms == 3 else 0.5 * 1e-3 ** (1 / 6)
    merge(model)  # a warning is an error here
    with torch.no_grad():
        stored(model[1])[entry] = 0.9
    if terms is None:
        assert merge(model) == 2
    else:
        for change in (materialize, merge):
            with pytest.warns(
                UserWarning, match=rf"1\.weight: the skew .* to {deviation:.1g} .*lower the .*, merge more often"
            ):
                change(copy.deepcopy(model))


def three(terms: int | None, entry: float) -> nn.Sequential:
    """Three layers, of which the second holds the entry."""
    model = nn.Sequential(*(equivalence(nn.Linear(8, 8), block_size=4, terms=terms) for _ in range(3)))
    with torch.no_grad():
        stored(model[1])[0], stored(model[2])[0] = entry, 1e-4
    return model


def test_the_warning_names_the_layer_that_is_lost() -> None:
    with pytest.warns(UserWarning, match=r"^1\.weight: the skew"):
        merge(three(8, 1e38))  # its defect overflows a float


@pytest.mark.parametrize("terms", [2, None])
def test_skew_vectors_that_are_not_finite_are_not_merged(terms: int | None) -> None:
    model = three(terms, torch.nan)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"skew vectors of 1\.weight hold NaN or Inf; nothing was merged"):
        merge(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


# ---- what users do with such layers


@pytest.mark.parametrize(("layer", "scheme"), [("tall", "block"), ("conv", "full"), ("stack", "fraction")])
def test_the_next_orders_are_those_of_the_loaded_seed_and_count(layer: str, scheme: str) -> None:
    module, name = build(layer, scheme, seed=1)
    merge(module)
    turn(module, name)
    W = getattr(module, name).detach().clone()
    twin = copy.deepcopy(module)
    merge(twin)
    assert torch.equal(getattr(module, name), W) and stored(module, name).abs().max() > 0
    for assign in (False, True):
        other, _ = build(layer, scheme, seed=2)
        other.load_state_dict(module.state_dict(), assign=assign)
        assert torch.equal(getattr(other, name), W)
    merge(other)
    assert torch.equal(constraint(other, name).in_places, constraint(twin, name).in_places)
    assert torch.equal(constraint(other, name).out_places, constraint(twin, name).out_places)


def test_states_without_a_W0_that_can_be_loaded_are_refused() -> None:
    module = equivalence(nn.Linear(8, 6), block_size=4)
    key, state = "parametrizations.weight.0.ordered_base", module.state_dict()
    without = {name: value for name, value in state.items() if name != key}
    refused: dict[str, dict[str, Tensor]] = {
        f'Missing key.*"{key}"': without,
        r"copying a param with shape torch.Size\(\[8, 6\]\)": state | {key: state[key].T},
        "Cannot copy out of meta tensor; no data": state | {key: state[key].to("meta")},
    }
    for message, wrong in refused.items():
        twin = equivalence(nn.Linear(8, 6), block_size=4)
        W0 = constraint(twin).base
        with pytest.raises(RuntimeError, match=message):
            twin.load_state_dict(wrong)
        assert torch.equal(constraint(twin).base, W0)
    # other orders alone: W0 stays, and rotates in them
    assert twin.load_state_dict(without, strict=False).missing_keys == [key]
    assert torch.equal(constraint(twin).out_places, constraint(module).out_places) and torch.equal(twin.weight, W0)
    assert set(twin.load_state_dict({}, strict=False).missing_keys) == set(twin.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers_rotate_in_float32(dtype: torch.dtype) -> None:
    for module in (equivalence(nn.Linear(9, 7, dtype=dtype), block_size=4),
                   equivalence(nn.Linear(9, 7), block_size=4).to(dtype)):  # fmt: skip
        assert constraint(module).base.dtype == module.weight.dtype == dtype and stored(module).dtype == torch.float32
        turn(module)
        expected = dense_weight(module, stored(module).detach().double())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(module.weight.double(), expected, rtol=eps, atol=eps / 100)
        for tokens in (3, 400):
            x = torch.randn(tokens, 9, dtype=dtype)
            y = module(x)
            assert y.dtype == dtype
            reference = F.linear(x.double(), expected, module.bias.double())
            torch.testing.assert_close(y.double(), reference, rtol=4 * eps, atol=4 * eps)
            y.sum().backward()
        gradient = stored(module).grad
        assert gradient is not None and gradient.dtype == torch.float32 and gradient.isfinite().all()
        before = module.weight.detach().clone()
        merge(module)
        assert torch.equal(module.weight, before)
        assert materialize(module).weight.dtype == dtype


@pytest.mark.parametrize("terms", [None, 2])
@pytest.mark.parametrize("tokens", [3, 400])
def test_autocast(tokens: int, terms: int | None) -> None:
    module: Any = equivalence(nn.Linear(9, 7), block_size=4, terms=terms)
    turn(module)
    x = torch.randn(tokens, 9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        W = module.weight
        assert copy.deepcopy(module).double()(x.double()).dtype == torch.float64
    assert y.dtype == torch.bfloat16 and W.dtype == torch.float32
    torch.testing.assert_close(W, module.weight)
    torch.testing.assert_close(y.float(), module(x), rtol=2e-2, atol=2e-2)
    low, high = (torch.autograd.grad(out.float().square().sum(), stored(module))[0] for out in (y, module(x)))
    assert low.dtype == torch.float32
    assert (low - high).norm() < 3e-2 * high.norm()


@pytest.mark.parametrize("tokens", [3, 400])
def test_a_large_bias_leaves_the_gradients_in_low_precision(tokens: int) -> None:
    """R does not rotate the bias, so its gradient must not hold the bias's rounding."""
    module = equivalence(nn.Linear(32, 32), block_size=8)
    turn(module)
    x, weights = torch.randn(tokens, 32), torch.randn(tokens, 32) + 0.3
    found: list[Tensor] = []
    for size, dtype in ((0.0, torch.float64), (1e3, torch.float32)):
        layer = copy.deepcopy(module).to(dtype)
        nn.init.constant_(layer.bias, size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            y = layer(x.to(dtype))
        found += torch.autograd.grad((y.to(dtype) * weights.to(dtype)).sum(), stored(layer))
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


BACKEND: Any = torch.backends.mkldnn
PRODUCTS = BACKEND.matmul


@pytest.fixture
def low_precision_products() -> Iterator[None]:
    before = PRODUCTS.fp32_precision
    PRODUCTS.fp32_precision = "bf16"
    yield
    PRODUCTS.fp32_precision = before


@pytest.mark.usefixtures("low_precision_products")
@pytest.mark.parametrize("terms", [2, 3, None])
def test_W_and_the_maps_to_blocks_stay_in_full_precision(terms: int | None) -> None:
    found: set[tuple[bool, str]] = set()  # whether of tokens, and the precision

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__.rstrip("_") in ("mm", "bmm", "baddbmm", "linalg_lu_solve"):
                found.add((any(isinstance(arg, Tensor) and 5 in arg.shape for arg in args), PRODUCTS.fp32_precision))
            return func(*args, **(kwargs or {}))

    layer = equivalence(nn.Linear(144, 144, bias=False), block_size=72, terms=terms)
    turn(layer)
    x = torch.randn(5, 144, requires_grad=True)
    part, vector = constraint(layer), stored(layer)
    for input_centric in (True, False):
        found.clear()
        with Record():
            W0, spec, places = part.ordered_base, part.spec, (part.out_places, part.in_places)
            poet_linear(x, W0, vector, spec, places, input_centric=input_centric).sum().backward()
        assert found == {(False, "ieee"), (True, "bf16")}  # those with x are as nn.Linear's
    found.clear()
    with Record():
        layer.weight.sum().backward()
    assert found == {(False, "ieee")}


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer = equivalence(nn.Linear(8, 8), block_size=4)
    for x, got in (
        (torch.ones(2, 8, dtype=torch.int64), r"\(2, 8\) in torch.int64"),
        (torch.ones(2, 7), r"\(2, 7\) in torch.float32"),
        (torch.tensor(1.0), r"\(\) in torch.float32"),
    ):
        with pytest.raises(ValueError, match=rf"expected inputs \(\.\.\., 8\) in torch.float32, got {got}"):
            layer(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("scheme", "tokens"), [("block", 400), ("full", 3)])
def test_forward_compiles_to_one_graph(scheme: str, tokens: int) -> None:
    module: Any = equivalence(nn.Linear(9, 7), **SCHEMES[scheme])
    turn(module)
    assert_one_graph(module, torch.randn(tokens, 9), merge, turn)


def test_nothing_of_the_weights_size_is_kept_for_the_backward() -> None:
    def kept(module: nn.Module, tokens: int, low: bool = False) -> int:
        """Numbers saved for the backward beyond parameters and buffers."""
        sizes = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=low):
            module(torch.randn(tokens, 64, requires_grad=True))
        own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
        return sum(size for place, size in sizes.items() if place not in own)

    cases: Any = itertools.product(((8, 4), (2048, 32)), ("block", "full"), (False, True))
    for (tokens, b), scheme, low in cases:
        module = equivalence(nn.Linear(64, 64, bias=False), scheme=scheme, block_size=b)
        spec = constraint(module).spec
        assert spec.R.block == b
        input_centric = prefers_input_centric(tokens, spec, low_precision=low)
        assert input_centric == (tokens == 8)
        activations = tokens * 64 * (2 if input_centric else 1)
        assert kept(module, tokens, low) <= activations + 3 * (2 * 64 * b)
    # a layer that forms its weight in the ordinary way keeps it
    assert kept(orthogonal(nn.Linear(64, 64, bias=False)), 8) > 64 * 64


# ---- whole models


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(8, 8), "up": nn.Linear(8, 16)}) for _ in range(2))
        self.lm_head = nn.Linear(8, 11)


BODY = ["blocks.0.query", "blocks.0.up", "blocks.1.query", "blocks.1.up"]


def test_a_model_keeps_its_heads_and_its_layers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    assert equivalence_(model, seed=1, block_size=4) == (BODY, ["lm_head"])
    shown = capsys.readouterr().out
    assert "4 linear layers: blocks.0.query, " in shown and "left unchanged: lm_head" in shown
    orders = [constraint(model.get_submodule(name)).in_places.tolist() for name in BODY[::2]]
    assert orders[0] != orders[1]
    again = Model()
    equivalence_(again, seed=1, block_size=4, verbose=False)
    assert capsys.readouterr().out == ""
    assert not any(name.endswith("query.weight") for name in model.state_dict())  # which transformers alone would read
    for (name, one), other in zip(model.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other) or name.endswith("base"), name
    assert equivalence_(model, verbose=False) == ([], [*BODY, "lm_head"])  # constrained already
    assert merge(model) == 4


def test_patterns() -> None:
    assert equivalence_(Model(), "*.query", verbose=False)[0] == BODY[::2]
    assert equivalence_(Model(), ["blocks.1.*"], ["*.up"], verbose=False)[0] == ["blocks.1.query"]
    assert equivalence_(Model(), exclude=(), verbose=False)[0] == [*BODY, "lm_head"]
    assert equivalence_(Model(), ["blocks.0.*", "*lm_head"], verbose=False)[0] == [*BODY[:2], "lm_head"]
    assert equivalence_(nn.ModuleDict({"decoder": Model()}), "decoder.*", verbose=False)[1] == ["decoder.lm_head"]
    tied = Model()
    tied.lm_head.weight = tied.embedding.weight
    assert equivalence_(tied, exclude=(), verbose=False) == (BODY, ["lm_head"])
    for include, exclude in (("*.key", None), ("*", "*.key")):
        with pytest.raises(ValueError, match=r"'\*\.key' matches no linear layer; there are: 'blocks\.0\.query', "):
            equivalence_(Model(), include, exclude)
    model = Model()
    with pytest.raises(ValueError, match="unknown options rank; equivalence takes scheme"):
        equivalence_(model, rank=3)
    with pytest.raises(ValueError, match="unknown scheme"):
        equivalence_(model, scheme="svd")
    with pytest.raises(ValueError, match=r"no nn\.Linear is selected .* weight matrices are in Embedding: call"):
        equivalence_(nn.Sequential(model.embedding, model.norm))
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


def test_all_layers_of_a_model_or_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4))
    assert equivalence_(copy.deepcopy(model), out_share=1.0, verbose=False) == (["0", "2"], ["1"])  # one row
    with torch.no_grad():
        model[2].get_parameter("weight").fill_(torch.nan)
    for last, message in ((model[2], "2: expected Linear.weight to be finite"), (nn.LazyLinear(4), "has no shape yet")):
        model[2] = last
        with pytest.raises(ValueError, match=message):
            equivalence_(model, verbose=False)
        assert not any(parametrize.is_parametrized(module) for module in model.modules())


@pytest.mark.parametrize(
    ("saved", "other"),
    [({"terms": None}, {"terms": 1}), ({"block_size": 4, "out_share": 0.25}, {"block_size": 4, "out_share": 0.75})],
)
def test_a_state_of_other_options_is_refused(saved: dict[str, Any], other: dict[str, Any]) -> None:
    module = equivalence(nn.Linear(32, 32), **saved)
    turn(module)
    twin = equivalence(nn.Linear(32, 32), **other)
    assert stored(twin).shape == stored(module).shape, "else the shapes tell"
    with pytest.raises(RuntimeError, match=r"expected the state of equivalence\(.*but its form is equivalence\("):
        twin.load_state_dict(module.state_dict())


# ---- errors

WRONG: dict[str, dict[str, Any]] = {
    "unknown scheme 'svd'; choose one of block, full": {"scheme": "svd"},
    "unknown init 'zeros'; choose one of keep, normalized": {"init": "zeros"},
    "integer >= 2, got 2.5": {"block_size": 2.5},
    'fraction needs scheme="full"': {"fraction": 0.5},
    "expected 0 < fraction <= 1, got 0.0": {"fraction": 0.0, "scheme": "full"},
    "expected 0 < fraction <= 1, got '0.5'": {"fraction": "0.5", "scheme": "full"},
    "nothing to rotate; choose a larger block_size": {"fraction": 0.01, "scheme": "full"},
    "terms to be an integer >= 1, or None": {"terms": 0},
    "seed to be an integer >= 0, got -1": {"seed": -1},
    "expected 0 <= out_share <= 1": {"out_share": 1.1},
}


def test_wrong_options_are_refused_and_leave_the_layer() -> None:
    module = nn.Linear(6, 6)
    before = module.weight.detach().clone()
    for message, options in WRONG.items():
        with pytest.raises(ValueError, match=message):
            equivalence(module, **options)
        assert type(module) is nn.Linear and torch.equal(module.weight, before), message


@every_pair
def test_a_copy_whose_buffers_are_written_by_data_follows_a_merge(layer: str, scheme: str) -> None:
    module, name = build(layer, scheme)
    average = copy.deepcopy(module)
    turn(module, name)
    before = getattr(average, name).detach().clone()
    merge(module)
    for own, other in zip(average.buffers(), module.buffers(), strict=True):
        own.data.copy_(other.data)  # as averages of weights do; the tensors' versions stay
    assert not torch.equal(getattr(average, name), before)
    torch.testing.assert_close(getattr(average, name), getattr(module, name))
