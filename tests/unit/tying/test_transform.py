"""Products with T = L Lᵀ and its inverse, and what PIT and the loss spend: against float64 autograd through T."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import as_if_compiled
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from manifold_tying import PIT
from manifold_tying.tying import _manifold_pit, linear_cross_entropy
from manifold_tying.tying._transform import divide_by_transform, multiply_by_transform

D = 6
Map = Callable[[Tensor, Tensor], Tensor]


def multiply(rows: Tensor, L: Tensor) -> Tensor:
    """The oracles: T is formed, and autograd does the rest."""
    return rows @ (L @ L.mT)


def divide(rows: Tensor, L: Tensor) -> Tensor:
    return torch.linalg.solve((L @ L.mT).mT, rows.mT).mT


MAPS: dict[str, tuple[Map, Map]] = {
    "multiply": (multiply_by_transform, multiply),
    "divide": (divide_by_transform, divide),
}
every_map = pytest.mark.parametrize("name", MAPS)


def factor(d: int = D, seed: int = 0) -> Tensor:
    """L of condition about 10, in float64."""
    generator = torch.Generator().manual_seed(seed)
    L = 0.3 * torch.randn(d, d, generator=generator, dtype=torch.float64).tril(-1)
    return L + torch.diag(0.6 + torch.rand(d, generator=generator, dtype=torch.float64))


def operands(n: int, d: int = D) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    rows, weights = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    return rows, factor(d, n), weights


def gradients(f: Map, rows: Tensor, L: Tensor, weights: Tensor, frozen: str) -> list[Tensor]:
    """The value, then the gradients of what is not frozen."""
    rows, L = (t.detach().clone() for t in (rows, L))
    leaves = [t.requires_grad_() for name, t in (("rows", rows), ("L", L)) if name != frozen]
    value = f(rows, L)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]


@every_map
@pytest.mark.parametrize("n", [1, D - 1, D, 40])
def test_values_and_gradients_are_those_through_the_transform(name: str, n: int) -> None:
    """L's gradient is that of the function of T = L Lᵀ for any square L, the upper triangle included."""
    for frozen in ("nothing", "rows", "L"):
        found, expected = (gradients(f, *operands(n), frozen) for f in MAPS[name])
        assert len(found) == len(expected) == (3 if frozen == "nothing" else 2)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-11, atol=1e-11
            )  # float64 rounding times the square of L's condition
        if frozen != "L":
            assert found[-1].triu(1).any()  # so the comparison above does see the upper triangle


@every_map
def test_float32_carries_no_more_than_rounding(name: str) -> None:
    ours, oracle = MAPS[name]
    rows, L, weights = operands(40)
    for a, b in zip(
        gradients(ours, rows.float(), L.float(), weights.float(), "nothing"),
        gradients(oracle, rows.float().double(), L.float().double(), weights.float().double(), "nothing"),
        strict=True,
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 1.2e-7 * 200 * b.norm()  # rounding times the condition of T, up to a few hundred


class Largest(TorchDispatchMode):
    """Counts operations by name, and notes the shapes of all that has ``columns`` columns."""

    def __init__(self, columns: int = -1) -> None:
        super().__init__()
        self.columns = columns
        self.rows = 0
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(result, Tensor) and result.ndim == 2 and result.shape[1] == self.columns:
            self.rows = max(self.rows, result.shape[0])
        return result


def test_frozen_rows_cost_no_solve_with_all_of_them() -> None:
    """With Z frozen, its gradient's two solves with n rows are replaced by two with d."""

    def right_sides(frozen: bool) -> list[int]:
        rows, L, weights = operands(40)
        value = divide_by_transform(rows.requires_grad_(not frozen), L.requires_grad_())
        counts: list[int] = []
        real = torch.linalg.solve_triangular

        def spy(A: Tensor, B: Tensor, **options: Any) -> Tensor:
            counts.append(B.numel() // D)
            return real(A, B, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "solve_triangular", spy)
            (value * weights).sum().backward()
        return counts

    assert right_sides(frozen=True) == [D, D]
    assert right_sides(frozen=False) == [40, 40]  # negative control


# What an embedding solves for

V = 30


def pit_with_transform(memory: Any = "trainable", d: int = D) -> PIT:
    pit = PIT(V, d, memory=memory).double()
    pit.cholesky_factor = factor(d, 3).contiguous()
    return pit


def stored(pit: PIT, name: str) -> Tensor:
    parametrizations: Any = pit.parametrizations
    return parametrizations[name].original


def solved_rows(pit: PIT, ids: Tensor, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> tuple[Tensor, list[int]]:
    """The embeddings of ids, and how many rows went through the solves."""
    heights: list[int] = []

    def spy(rows: Tensor, L: Tensor) -> Tensor:
        heights.append(len(rows))
        return divide_by_transform(rows, L)

    with monkeypatch.context() as patch:
        patch.setattr(_manifold_pit, "divide_by_transform", spy)
        if compiled:
            as_if_compiled(patch)
        return pit.embed(ids), heights


IDS = {
    "one": torch.tensor([7]),
    "scalar": torch.tensor(4),
    "none": torch.zeros(0, dtype=torch.int64),
    "repeated": torch.tensor([[3, 3, 9], [9, 3, 0]]),
    "int32": torch.tensor([5, 1, 5], dtype=torch.int32),
    "exactly V": torch.arange(V).flip(0),
    "more than V": torch.arange(100) % 11 + 2,
    "all of them, twice": torch.arange(2 * V).view(4, -1) % V,
}


@pytest.mark.parametrize("compiled", [False, True])
def test_each_token_is_embedded_as_alone_and_solved_for_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pit = pit_with_transform()
    Z, L = pit.memory.detach(), pit.cholesky_factor.detach()
    E = torch.linalg.solve(L @ L.T, Z.T).T  # T is symmetric
    for chosen in IDS.values():
        together, heights = solved_rows(pit, chosen, monkeypatch, compiled)
        assert heights == [min(chosen.numel(), V) if compiled else len(set(chosen.flatten().tolist()))]
        assert together.shape == (*chosen.shape, D)
        torch.testing.assert_close(together, E[chosen.long()], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)  # Dynamo
def test_really_compiled_it_solves_for_the_fewer_too() -> None:
    pit = pit_with_transform("frozen")
    right_sides: list[int] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.linalg_solve_triangular.default:
                right_sides.append(node.meta["val"].numel() // D)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note)
    for ids, expected in ((IDS["repeated"], 6), (IDS["more than V"], V)):
        torch._dynamo.reset()
        right_sides.clear()
        with torch.no_grad():
            compiled = torch.compile(pit.embed, fullgraph=True, backend=backend, dynamic=False)(ids)
            torch.testing.assert_close(compiled, pit.embed(ids))
        assert right_sides and set(right_sides) == {expected}


@pytest.mark.parametrize(
    ("ids", "compiled", "memory"),
    [
        ("scalar", False, "trainable"),
        ("repeated", False, "trainable"),
        ("more than V", True, "trainable"),
        ("repeated", True, "frozen"),
        ("more than V", False, "frozen"),
    ],
)
def test_gradients_of_an_embedding_are_those_through_the_table(
    ids: str, compiled: bool, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E = Z T⁻¹ formed whole and looked up, down to the stored tensors of Z and L."""
    pit, chosen = pit_with_transform(memory), IDS[ids]
    weights = torch.randn(*chosen.shape, D, dtype=torch.float64)
    e, _ = solved_rows(pit, chosen, monkeypatch, compiled)
    (e * weights).sum().backward()
    Z = stored(pit, "memory").detach().clone().requires_grad_()
    raw = stored(pit, "cholesky_factor").detach().clone().requires_grad_()
    L = raw.tril(-1) + torch.diag(F.softplus(raw.diagonal()))
    ((Z @ torch.linalg.inv(L @ L.T))[chosen.long()] * weights).sum().backward()
    for name, expected in (("cholesky_factor", raw.grad), ("memory", Z.grad)):
        found = stored(pit, name).grad
        if memory == "frozen" and name == "memory":
            assert found is None
            continue
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    found = stored(pit, "cholesky_factor").grad
    assert (
        found is not None and not found.triu(1).any() and found.tril().any()
    )  # the upper part is dropped, as promised


# How the loss is cut up


def loss_problem(N: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(N)
    h, W = torch.randn(N, 1).to(dtype).requires_grad_(), torch.randn(size, 1).to(dtype).requires_grad_()
    return h, W, torch.randint(size, (N,))


@pytest.mark.parametrize("how", ["float32", "float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("N", [5, 36, 1000])
def test_the_loss_holds_one_of_so_many_chunks(how: str, N: int) -> None:
    low = how in ("bfloat16", "autocast")
    rows = -(-N // (18 if low else 12))
    h, W, targets = loss_problem(N, 53, torch.float32 if how == "autocast" else getattr(torch, how))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"), Largest(columns=53) as watch:
        value = linear_cross_entropy(h, W, targets)
    assert watch.rows == rows  # the most tokens whose logits are there at once
    piece = -(-rows // 4) if low else rows  # a softmax in float32 is that of a quarter
    assert watch.counts["exp_"] == sum(-(-min(rows, N - start) // piece) for start in range(0, N, rows))
    expected = F.cross_entropy(h.double() @ W.double().T, targets)
    torch.testing.assert_close(value.double(), expected, rtol=2e-2 if low else 1e-5, atol=1e-5)
    with Largest(columns=53) as watch:  # negative control
        F.cross_entropy(h @ W.T, targets)
    assert watch.rows == N
