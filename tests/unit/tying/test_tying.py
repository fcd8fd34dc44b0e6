"""Token interfaces: one protocol, and for PIT what it promises about W_out E, precision, gradients and checkpoints."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from compiling import as_if_compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manifold_tying import PIT, TokenInterface, TransposeTying, Untied, equivalence, materialize
from manifold_tying.linalg import defect

V, D = 40, 8


def random_spd(d: int, condition: float, seed: int = 0) -> Tensor:
    """T in float64 with eigenvalues spread evenly in the logarithm around 1."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    half = np.log10(condition) / 2
    return (Q * torch.logspace(-half, half, d, dtype=torch.float64)) @ Q.T


def set_transform(pit: PIT, T: Tensor) -> PIT:
    pit.cholesky_factor = torch.linalg.cholesky(T).to(pit.cholesky_factor.dtype).contiguous()
    return pit


def pit_with(condition: float = 30.0, **options: Any) -> Any:  # a ManifoldPIT, whose private parts some tests use
    return set_transform(PIT(V, D, **{"memory": "frozen", **options}), random_spd(D, condition))


def table(rows: int = V, columns: int = D, seed: int = 0) -> Tensor:
    """A table of condition about 3, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) @ random_spd(columns, 2.0, seed)


INTERFACES: dict[str, Callable[[], TokenInterface]] = {
    "transpose": lambda: TransposeTying(V, D),
    "pit-frozen": lambda: PIT.from_embedding(table().float(), transform="head", memory="frozen"),
    "pit-free": lambda: PIT.from_embedding(table().float(), transform="head"),
}


# The protocol; what every interface must keep is in test_contracts.py


@pytest.mark.parametrize("name", INTERFACES)
def test_ignored_targets_and_kinds_of_ids(name: str) -> None:
    interface = INTERFACES[name]()
    hidden, targets = torch.randn(6, D), torch.randint(V, (6,))
    targets[:4] = 3
    expected = F.cross_entropy(interface.logits(hidden), targets, ignore_index=3)
    torch.testing.assert_close(interface.loss(hidden, targets, ignore_index=3), expected)
    assert interface.loss(hidden, torch.full((6,), -100)) == 0
    assert torch.equal(interface.embed(targets.int()), interface.embed(targets))
    for bad in (targets.float(), targets > 2, targets.to(torch.uint8)):
        with pytest.raises(ValueError, match="token ids"):
            interface.embed(bad)


@pytest.mark.parametrize("name", ["pit-frozen", "pit-free"])
def test_tables_are_drawn_again_and_given_in_any_dtype(name: str) -> None:
    interface: Any = INTERFACES[name]().requires_grad_()
    interface.reset_parameters()
    for dtype in (torch.float64, torch.bfloat16):
        assert all(table.dtype == dtype for table in interface.materialize(dtype))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "tokens"), [("pit-frozen", 4), ("pit-frozen", 2 * V), ("pit-free", 2 * V)])
def test_compiled_is_eager(name: str, tokens: int) -> None:
    interface = INTERFACES[name]()
    ids, targets = torch.randint(V, (tokens,)), torch.randint(V, (2, 2))
    hidden = torch.randn(2, 2, D, requires_grad=True)
    leaves = [hidden, *(p for p in interface.parameters() if p.requires_grad)]

    def use(ids: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        return interface.loss(hidden, targets) + interface.embed(ids).square().sum()

    compiled: Any = torch.compile(use, fullgraph=True, backend="aot_eager")
    values = [f(ids, targets, hidden) for f in (use, compiled)]
    results = [(value, *torch.autograd.grad(value, leaves)) for value in values]
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-6)  # the same operations, another order of sums


# torch's own, where it traces an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Strict export traces as torch.compile does, which the test above has of the others.
@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in INTERFACES), ("transpose", True)])
def test_an_exported_graph_takes_any_number_of_tokens(name: str, strict: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.interface = INTERFACES[name]()
            self.body = equivalence(nn.Linear(D, D), block_size=D)

        def forward(self, ids: Tensor) -> Tensor:
            return self.interface.logits(self.body(self.interface.embed(ids)))

    model = Model()
    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (torch.randint(V, (5,)),), dynamic_shapes=shapes, strict=strict)
    for tokens in (2, 3 * V):
        ids = torch.randint(V, (tokens,))
        torch.testing.assert_close(program.module()(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", INTERFACES)
def test_an_id_that_the_table_lacks_is_named(name: str) -> None:
    interface = INTERFACES[name]()
    for ids, wrong in (([[0, V]], V), ([2 * V], 2 * V), ([1, -1], -1)):
        with pytest.raises(
            IndexError, match=rf"expected token ids from 0 to {V - 1}, got {wrong}; check the tokenizer"
        ):
            interface.embed(torch.tensor(ids))
    assert interface.embed(torch.zeros(0, 2, dtype=torch.int32)).shape == (0, 2, D)


def test_a_materialized_memory_cannot_be_drawn_again() -> None:
    with pytest.raises(RuntimeError, match="materialize removed the constraints"):
        materialize(PIT(V, D, memory="frozen")).reset_parameters()


def test_sizes_must_be_positive() -> None:
    for kind, sizes in itertools.product((Untied, TransposeTying, PIT), ((0, 4), (4, 0), (-1, 4))):
        with pytest.raises(ValueError, match="positive sizes"):
            kind(*sizes)


# W_out E = I


def interface_error(E: Tensor, W_out: Tensor) -> float:
    d = E.shape[1]
    return float(np.linalg.norm(W_out.double().numpy() @ E.double().numpy() - np.eye(d)) / d**0.5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 24), st.integers(0, 60), st.floats(0, 3), st.sampled_from([None, 1e-12]), st.integers(0, 10**6))
def test_the_interface_is_consistent_whatever_the_transform(
    d: int, extra: int, decades: float, of_double: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    pit, bound = PIT(d + extra, d, memory="frozen"), of_double or 1e-4
    pit = pit.double() if of_double else pit
    set_transform(pit, random_spd(d, 10**decades, seed))
    with torch.no_grad():
        embedded, scores = pit.embed(torch.arange(d + extra)), pit.logits(torch.eye(d, dtype=pit.memory.dtype))
    assert interface_error(*pit.materialize()) <= bound
    assert interface_error(embedded, scores) <= bound
    # Negative control: a memory off the manifold, by far less than a training step, is seen.
    with torch.no_grad():
        original: Any = pit.parametrizations.memory.original  # type: ignore[union-attr]
        original.mul_(1 + 1e-3)
    with pytest.warns(UserWarning, match="off the manifold: memory"):
        assert interface_error(*pit.materialize()) > 1e-3


def test_random_start_is_orthonormal_with_identity_transform() -> None:
    pit = PIT(200, 16, memory="frozen")
    assert defect(pit.memory) <= 1e-6
    torch.testing.assert_close(pit.transform, torch.eye(16), rtol=0, atol=1e-6)
    assert not torch.equal(pit.memory, PIT(200, 16, memory="frozen").memory)


# Starting from a table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_from_embedding(dtype: torch.dtype) -> None:
    E0 = table()
    U, H = scipy.linalg.polar(E0.numpy())
    # float32: a few roundings times the condition of the table, about 3
    close: Any = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    kinds: tuple[Any, ...] = ("identity", "head", "embedding")
    start = {kind: PIT.from_embedding(E0.to(dtype), transform=kind, memory="frozen") for kind in kinds}
    for pit in start.values():
        assert pit.memory.dtype == dtype and defect(pit.memory) <= (1e-6 if dtype == torch.float32 else 1e-14)
        torch.testing.assert_close(pit.memory.double(), torch.from_numpy(U), **close)
    torch.testing.assert_close(start["identity"].transform.double(), torch.eye(D).double(), **close)
    torch.testing.assert_close(start["head"].transform.double(), torch.from_numpy(H), rtol=1e-5, atol=close["atol"])
    torch.testing.assert_close(start["head"].materialize()[1].double(), E0.T, **close)
    torch.testing.assert_close(start["embedding"].materialize()[0].double(), E0, **close)
    # Negative control: no transform gives both sides.
    assert (start["head"].materialize()[0].double() - E0).norm() > 0.1
    assert (start["embedding"].materialize()[1].double() - E0.T).norm() > 0.1


def test_from_embedding_does_not_touch_the_table_and_takes_its_dtype() -> None:
    weight = nn.Parameter(table().bfloat16())
    before = weight.detach().clone()
    pit = PIT.from_embedding(weight, transform="head", memory="trainable")
    assert torch.equal(weight, before) and weight.grad is None
    assert pit.memory.dtype == torch.float32 and pit.embed(torch.tensor([1])).dtype == torch.bfloat16
    torch.testing.assert_close(pit.materialize()[1].double(), before.double().T, rtol=0, atol=1e-5)


def test_plain_tables_start_with_normal_entries() -> None:
    for interface in (Untied(500, 20, std=0.5), TransposeTying(500, 20, std=0.5)):
        for p in interface.parameters():
            assert abs(p.mean().item()) < 0.05 and p.std().item() == pytest.approx(0.5, rel=0.05)


def test_tables_that_pit_cannot_start_from() -> None:
    zero, long, nan = table(), table(), table()
    zero[:, 2] = 0
    long[:, 2] *= 1e7
    nan[3, 3] = float("nan")
    for weight, message in (
        (table(4, 8), "V >= d"),
        (torch.ones(V, D), "column rank"),
        (zero, "column rank"),
        (long, "column rank"),
        (nan, "finite"),
        (torch.ones(V, D, dtype=torch.long), "floating"),
        (torch.ones(V, D, 2), "table"),
    ):
        with pytest.raises(ValueError, match=message):
            PIT.from_embedding(weight)


def test_options_out_of_their_range_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"memory": "cold"}, "frozen, trainable"),
        ({"diagonal": "relu"}, "softplus, exp"),
        ({"retraction": "euler"}, "polar, qr, cayley, cayley-neumann"),
        ({"transform": "nearest"}, "identity, head, embedding"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            PIT.from_embedding(table(), **{"memory": "frozen", **options})
    with pytest.raises(ValueError, match="vocab_size >= hidden_size"):
        PIT(7, 8)


# State and dtype


@pytest.mark.parametrize(("dtype", "through_parent"), [(torch.bfloat16, True), (torch.float16, False)])
def test_low_precision_models_keep_a_float32_interface(dtype: torch.dtype, through_parent: bool) -> None:
    pit = pit_with(1e3)
    exact = copy.deepcopy(pit).double()
    memory, factor = pit.memory.clone(), pit.cholesky_factor.clone()
    (nn.Sequential(pit) if through_parent else pit).to(dtype)
    assert torch.equal(pit.memory, memory) and torch.equal(pit.cholesky_factor, factor)
    assert pit.memory.dtype == pit.cholesky_factor.dtype == torch.float32
    ids = torch.arange(V)
    embedded = pit.embed(ids)
    assert embedded.dtype == dtype
    # One rounding of a float32 result: half a unit in the last place of each entry, nothing that grows with cond(T).
    torch.testing.assert_close(embedded.double(), exact.embed(ids), rtol=torch.finfo(dtype).eps, atol=1e-4)
    naive = memory.to(dtype).double() @ torch.linalg.inv(exact.transform)  # negative control: Z itself rounded
    assert not torch.allclose(naive, exact.embed(ids), rtol=torch.finfo(dtype).eps, atol=1e-4)
    logits = pit.logits(torch.randn(2, D, dtype=dtype))
    assert logits.dtype == dtype
    assert interface_error(*pit.materialize()) < 1e-4
    assert pit.float().embed(ids).dtype == torch.float32 and torch.equal(pit.memory, memory)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_in_float16_are_finite_where_those_of_the_table_are(autocast: bool) -> None:
    V = 4096
    pit = PIT(V, D, memory="trainable")
    pit.cholesky_factor = torch.linalg.cholesky(4 * torch.eye(D) + 1)
    targets = torch.randint(V, (50,))
    for scale in (1.0, 2e4):
        hidden = (scale * torch.randn(50, D)).half()
        transformed = hidden.double() @ pit.transform.detach().double()
        Z = pit.memory.detach().double().requires_grad_()
        exact = transformed @ Z.T
        expected = F.cross_entropy(exact, targets)
        assert transformed.half().isfinite().all() == (scale == 1.0) and exact.half().isfinite().all()
        x = hidden.float() if autocast else hidden
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            logits, loss = pit.logits(x), pit.loss(x, targets)
        assert logits.dtype == torch.float16
        torch.testing.assert_close(logits.double(), exact, rtol=0, atol=4e-3 * float(exact.detach().abs().max()))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
        (found,) = torch.autograd.grad(loss, [p for name, p in pit.named_parameters() if "memory" in name])
        (gradient,) = torch.autograd.grad(expected, Z)
        # far out softmax is a maximum, which rounding moves
        assert found.isfinite().all() and (scale > 1 or (found - gradient).norm() < 1e-2 * gradient.norm())


def test_integer_hidden_states_are_refused() -> None:
    for compute in (PIT(V, D).logits, lambda hidden: PIT(V, D).loss(hidden, torch.zeros(2, dtype=torch.int64))):
        with pytest.raises(ValueError, match="floating point, got"):
            compute(torch.ones(2, D, dtype=torch.int64))


def test_autocast_and_reduced_precision_leave_embeddings_and_the_map_by_the_transform_alone() -> None:
    pit = pit_with(1e3)
    ids, hidden = torch.arange(V), torch.randn(200, D)
    T = pit.transform.double()
    plain, exact = pit.embed(ids), hidden.double() @ T
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pit.embed(ids), plain) and torch.equal(pit.transform.double(), T)
            readouts = pit._readout(hidden), pit._readout(hidden[:2])
            scores, loss = pit.logits(hidden), pit.loss(hidden, ids.repeat(5))
            rounded = hidden @ T.float()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    for g in readouts:
        # float32 rounding; h T in bfloat16 is off by a thousandth, see below
        assert g.dtype == torch.float32 and (g - exact[: len(g)]).norm() < 1e-6 * exact.norm()
    assert (rounded - exact).norm() > 1e-3 * exact.norm()  # negative control
    assert scores.dtype == torch.bfloat16 and loss.dtype == torch.float32


# Gradients


# h (L Lᵀ) is computed in either order, by the number of rows; compiled, an embedding of more than V ids divides all rows.
@pytest.mark.parametrize(
    ("tokens", "diagonal", "memory", "compiled"),
    [(3, "softplus", "frozen", False), (50, "exp", "trainable", False), (50, "softplus", "trainable", True)],
)
def test_gradients_are_those_of_the_explicit_formula(
    tokens: int, diagonal: Any, memory: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E = Z T⁻¹ by a dense inverse and W_out = T Zᵀ, differentiated by autograd in float64."""
    pit = pit_with(20.0, memory=memory, diagonal=diagonal).double()
    if compiled:
        as_if_compiled(monkeypatch)
    ids, targets = torch.randint(V, (tokens,)), torch.randint(V, (tokens,))
    hidden, weights = torch.randn(tokens, D, dtype=torch.float64), torch.randn(tokens, V, dtype=torch.float64)
    parameters = dict(pit.named_parameters())
    stored = [parameters[f"parametrizations.{name}.original"] for name in ("cholesky_factor", "memory")]
    raw, Z = (p.detach().clone().requires_grad_(p.requires_grad) for p in stored)
    positive = raw.diagonal().exp() if diagonal == "exp" else torch.log1p(raw.diagonal().exp())
    L = raw.tril(-1) + torch.diag(positive)
    T = L @ L.T
    E, W_out = Z @ torch.linalg.inv(T), T @ Z.T
    pairs = (
        ((pit.embed(ids) * hidden).sum(), (E[ids] * hidden).sum()),
        ((pit.logits(hidden) * weights).sum(), (hidden @ W_out * weights).sum()),
        (pit.loss(pit.embed(ids), targets), F.cross_entropy(E[ids] @ W_out, targets)),
    )
    trained = len(stored) if memory == "trainable" else 1
    for ours, explicit in pairs:
        torch.testing.assert_close(ours, explicit, rtol=1e-10, atol=1e-12)
        found = torch.autograd.grad(ours, stored[:trained], retain_graph=True)
        wanted = torch.autograd.grad(explicit, (raw, Z)[:trained], retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.fixture
def solved_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows go through each triangular solve."""
    heights: list[int] = []
    real = torch.linalg.solve_triangular

    def spy(A: Tensor, B: Tensor, **options: Any) -> Tensor:
        heights.append(B.numel() // D)
        return real(A, B, **options)

    monkeypatch.setattr(torch.linalg, "solve_triangular", spy)
    return heights


@pytest.mark.parametrize("compiled", [False, True])
def test_each_token_is_embedded_as_alone_and_solved_for_once(
    compiled: bool, solved_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pit = pit_with().double()
    E = pit.materialize()[0]
    if compiled:
        as_if_compiled(monkeypatch)
    for ids in (
        torch.tensor(4),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor([[3, 3, 9], [9, 3, 0]], dtype=torch.int32),
        torch.arange(V).flip(0),
        torch.arange(100) % 11 + 2,
    ):
        solved_rows.clear()
        torch.testing.assert_close(pit.embed(ids), E[ids.long()], rtol=1e-10, atol=1e-12)
        assert solved_rows == [min(ids.numel(), V) if compiled else len(ids.unique())] * 2


@pytest.mark.parametrize(("memory", "rows"), [("frozen", D), ("trainable", V)])
def test_a_frozen_memory_costs_no_solve_with_all_of_its_rows(memory: str, rows: int, solved_rows: list[int]) -> None:
    embedded = pit_with(memory=memory).embed(torch.arange(V))
    solved_rows.clear()
    embedded.sum().backward()
    assert solved_rows == [rows, rows]


@pytest.mark.parametrize("memory", ["frozen", "trainable"])
def test_a_materialized_interface_is_the_same_function_without_constraints(memory: Any) -> None:
    pit = PIT(30, 6, memory=memory)
    pit.cholesky_factor = torch.linalg.cholesky(torch.eye(6) + 0.3)
    ids, hidden = torch.arange(30), torch.randn(4, 6)
    before, text = (pit.embed(ids).detach(), pit.logits(hidden).detach()), f"memory={memory!r}"
    assert text in repr(pit)
    materialize(pit)
    assert set(pit.state_dict()) == {"memory", "cholesky_factor"} and text in repr(pit)
    assert torch.equal(pit.embed(ids), before[0]) and torch.equal(pit.logits(hidden), before[1])
