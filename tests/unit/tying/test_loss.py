"""linear_cross_entropy against dense float64 cross-entropy: values, gradients, low precision, memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import peak_bytes
from torch import Tensor

from manifold_tying.tying import linear_cross_entropy

Loss = Callable[..., Tensor]


def problem(N: int, d: int, V: int, *, masked: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(N, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    W = (torch.randn(V, d, generator=generator, dtype=torch.float64) / d**0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < masked] = -100
    return h, W, targets


def dense(
    h: Tensor,
    W: Tensor,
    targets: Tensor,
    *,
    token_weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The oracle: all logits at once; a sum over nothing divided by one where nothing counts."""
    x = h @ W.T if softcap is None else softcap * torch.tanh(h @ W.T / softcap)
    losses = F.cross_entropy(x, targets, reduction="none", label_smoothing=label_smoothing)
    weights = (targets != -100) * (1.0 if token_weight is None else token_weight)
    losses = weights * (losses + z_loss * x.logsumexp(1) ** 2)
    if reduction == "none":
        return losses
    return losses.sum() / (weights.sum() or 1.0) if reduction == "mean" else losses.sum()


def gradients(loss: Loss, h: Tensor, W: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    value = loss(h, W, targets)
    grad_h, grad_W = torch.autograd.grad(value * scale, (h, W))
    return value.detach(), grad_h, grad_W


def relative(a: Tensor, b: Tensor) -> float:
    return (torch.linalg.norm(a.double() - b.double()) / torch.linalg.norm(b.double())).item()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    N=st.integers(1, 37),  # three tokens a chunk, and one
    d=st.integers(1, 9),
    V=st.integers(1, 40),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1.0, -0.3]),
)
def test_value_and_gradients_are_those_of_dense_cross_entropy(
    N: int, d: int, V: int, masked: float, seed: int, scale: float
) -> None:
    """Any number of tokens: fewer than there are chunks, one, and an uneven last chunk."""
    h, W, targets = problem(N, d, V, masked=masked, seed=seed)
    for ours, expected in zip(
        gradients(linear_cross_entropy, h, W, targets, scale), gradients(dense, h, W, targets, scale), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)  # rounding of float64


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    N=st.integers(0, 37),
    V=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weighted=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "z_loss": st.sampled_from([0.0, 1e-2]),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "softcap": st.sampled_from([None, 0.5, 30.0]),
        }
    ),
)
def test_options_are_those_of_dense_cross_entropy(
    N: int, V: int, seed: int, masked: float, reduction: str, weighted: bool, options: dict[str, Any]
) -> None:
    h, W, targets = problem(N, 5, V, masked=masked, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    options |= {"reduction": reduction}
    if weighted:
        options["token_weight"] = torch.randint(0, 3, (N,), generator=generator).double() / 3
    cotangent = torch.randn(N, generator=generator).double() if reduction == "none" else torch.tensor(-0.7).double()
    found, expected = (f(h, W, targets, **options) for f in (linear_cross_entropy, dense))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(one, (h, W), cotangent) for one in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


OPTIONS: dict[str, Any] = {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 2.0}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_and_vmap_of_options(reduction: Any) -> None:
    h, W, targets = problem(6, 3, 7, masked=0.2)

    def loss(h: Tensor, W: Tensor) -> Tensor:
        return linear_cross_entropy(h, W, targets, reduction=reduction, **OPTIONS)

    assert torch.autograd.gradgradcheck(loss, (h, W))
    found = torch.func.vmap(loss, in_dims=(0, None))(torch.stack([h, 2 * h]).detach(), W.detach())
    torch.testing.assert_close(found[1], loss(2 * h, W).detach())


def test_float32_gradients_carry_no_more_than_rounding() -> None:
    h, W, targets = problem(500, 16, 300, masked=0.2)
    expected = gradients(dense, h, W, targets)
    narrow = (h.detach().float().requires_grad_(), W.detach().float().requires_grad_(), targets)
    for ours, exact in zip(gradients(linear_cross_entropy, *narrow), expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, exact) < 2e-6  # some ten float32 roundings
    # Negative control: this measure sees one wrong target in 500.
    wrong = targets.clone()
    wrong[wrong != -100] = torch.cat([(targets[targets != -100][:1] + 1) % 300, targets[targets != -100][1:]])
    assert relative(gradients(linear_cross_entropy, *narrow[:2], wrong)[0], expected[0]) > 1e-5


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_ignored_positions_do_not_count(ignore_index: int) -> None:
    h, W, targets = problem(50, 4, 12)
    targets[::3] = ignore_index
    ours = linear_cross_entropy(h, W, targets, ignore_index=ignore_index)
    torch.testing.assert_close(ours, F.cross_entropy(h @ W.T, targets, ignore_index=ignore_index))
    (grad,) = torch.autograd.grad(ours, h)
    assert not grad[targets == ignore_index].any() and grad[targets != ignore_index].any(1).all()


@pytest.mark.parametrize("N", [0, 1, 60])
def test_nothing_counted_is_zero_with_zero_gradients(N: int) -> None:
    h, W, targets = problem(N, 4, 12, masked=1.1)
    value, grad_h, grad_W = gradients(linear_cross_entropy, h, W, targets)
    assert value == 0 and not grad_h.any() and not grad_W.any()
    assert grad_h.shape == h.shape and grad_W.shape == W.shape


def test_any_leading_shape() -> None:
    h, W, targets = problem(24, 4, 12)
    expected = dense(h, W, targets)
    torch.testing.assert_close(linear_cross_entropy(h.view(2, 3, 4, 4), W, targets.view(2, 3, 4)), expected)
    torch.testing.assert_close(linear_cross_entropy(h[0], W, targets[0]), dense(h[:1], W, targets[:1]))


def test_a_second_backward_gives_the_same_gradients() -> None:
    """The first one gives its buffers away, so the second has to compute them again."""
    h, W, targets = problem(100, 6, 30)
    loss = linear_cross_entropy(h, W, targets)
    first = torch.autograd.grad(2 * loss, (h, W), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(2 * loss, (h, W), retain_graph=True)
    third = torch.autograd.grad(-loss, (h, W))
    for a, b, c, d in zip(first, second, third, kept, strict=True):
        assert torch.equal(a, d), "a later backward must not write into what was handed out"
        assert torch.equal(a, b)
        torch.testing.assert_close(c, -a / 2)


@pytest.mark.parametrize("which", ["hidden", "table"])
def test_only_one_side_requires_a_gradient(which: str) -> None:
    h, W, targets = problem(40, 6, 30)
    h, W = (h, W.detach()) if which == "hidden" else (h.detach(), W)
    wanted = h if which == "hidden" else W
    (ours,) = torch.autograd.grad(linear_cross_entropy(h, W, targets), wanted)
    (expected,) = torch.autograd.grad(dense(h, W, targets), wanted)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("options", [{}, OPTIONS, {"reduction": "none"}], ids=["plain", "options", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_a_tenth_of_the_logits(dtype: torch.dtype, options: dict[str, Any]) -> None:
    N, d, V = 6144, 8, 6000  # large enough that the products' own workspaces hardly count: 1 MB on processors with AMX
    h, W, targets = problem(N, d, V, dtype=dtype)
    logits = N * V * dtype.itemsize
    kept = (N * d + V * d) * dtype.itemsize
    ours = peak_bytes(lambda: linear_cross_entropy(h, W, targets, **options).sum().backward())
    assert 0 < ours - kept <= logits / 10
    # Negative control: the measurement sees the dense reference's logits.
    if not options:
        assert peak_bytes(lambda: F.cross_entropy((h @ W.T).float(), targets).backward()) >= logits


def reference(h: Tensor, W: Tensor, targets: Tensor) -> Tensor:
    """What is usually done in bfloat16: all logits in it, the softmax in float32."""
    return F.cross_entropy((h @ W.T).float(), targets)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("N", [5, 3000])
def test_low_precision_is_as_close_to_float64_as_full_logits(how: str, N: int) -> None:
    """The bound is the full-logits reference's own error; a fifth more for the other order of the same roundings.

    Root mean squares over problems: how the roundings of a single loss cancel is luck, which processors share out differently.
    """
    errors = []
    for seed in range(12 if N == 5 else 1):
        dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
        h, W, targets = problem(N, 32, 200, masked=0.1, dtype=dtype, seed=seed)
        exact = gradients(dense, h.detach().double().requires_grad_(), W.detach().double().requires_grad_(), targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            ours = gradients(linear_cross_entropy, h, W, targets)
            theirs = gradients(reference, h, W, targets)
        assert ours[0].dtype == torch.float32 and ours[1].dtype == h.dtype and ours[2].dtype == W.dtype
        errors.append([[relative(x, y) for x, y in zip(found, exact, strict=True)] for found in (ours, theirs)])
    mine, their = torch.tensor(errors).square().mean(0).sqrt()
    assert mine[0] <= 1.2 * their[0] + 1e-6
    assert (mine[1:] > 1e-4).all() and (mine[1:] <= 1.2 * their[1:]).all()  # its products are in bfloat16, too


def test_the_scalar_does_not_stall_in_bfloat16() -> None:
    """20,000 tokens at 10.6 nats each; a bfloat16 sum stops growing after some hundred of them."""
    N, logits = 20_000, torch.tensor([[10.625], [0.0]])  # 10.625 is a bfloat16 number
    h = torch.ones(N, 1, dtype=torch.bfloat16)
    value = linear_cross_entropy(h, logits.bfloat16(), torch.ones(N, dtype=torch.long))
    exact = logits.double().logsumexp(0)[0].float()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
    stalled = torch.zeros((), dtype=torch.bfloat16)  # negative control
    for _ in range(2000):
        stalled += exact.bfloat16()
    assert stalled / 2000 < 0.5 * exact


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_stay_finite(size: float) -> None:
    h, W = torch.full((3, 1), size), torch.tensor([[1.0], [-1.0], [0.5]])
    h.requires_grad_()
    loss = linear_cross_entropy(h, W, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(loss, torch.tensor((0 + 2 * size + size / 2) / 3))
    assert torch.isfinite(torch.autograd.grad(loss, h)[0]).all()


@pytest.mark.parametrize(
    ("h", "W", "targets", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(5, 3), torch.zeros(3).long(), "table"),
        (torch.zeros(3, 4), torch.zeros(2, 5, 4), torch.zeros(3).long(), "table"),
        (torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(6).long(), "one target for each"),
        (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3), "int64"),
        (torch.zeros(3, 4), torch.zeros(5, 4).long(), torch.zeros(3).long(), "real floating dtype, got torch.int64"),
    ],
)
def test_errors(h: Tensor, W: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(h, W, targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "avg"}, "unknown reduction 'avg'; choose one of mean, sum, none"),
        ({"z_loss": -1.0}, "z_loss >= 0.*got -1.0, 0.0 and None"),
        ({"label_smoothing": 1.5}, "label_smoothing from 0 to 1"),
        ({"softcap": 0.0}, "softcap > 0 or None"),
        ({"token_weight": torch.ones(2)}, r"one token_weight for each of \(3,\), got \(2,\)"),
    ],
)
def test_options_out_of_range(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long(), **options)


def test_the_weight_of_an_ignored_position_may_be_nan() -> None:
    h, W, targets = problem(3, 4, 5)
    targets[1] = -100
    weight = torch.tensor([1.0, float("nan"), 2.0])
    found = linear_cross_entropy(h, W, targets, token_weight=weight)
    torch.testing.assert_close(found, dense(h, W, targets, token_weight=weight.nan_to_num()))


def test_a_mean_is_zero_where_the_weights_cancel() -> None:
    h, W, targets = problem(2, 4, 5)
    loss = linear_cross_entropy(h, W, targets, token_weight=torch.tensor([1.0, -1.0]))
    assert loss == 0 and not any(grad.any() for grad in torch.autograd.grad(loss, (h, W)))


@pytest.mark.parametrize("target", [5, -1])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([0, target, 1]))


def test_float64_stays_under_autocast() -> None:
    """As nn.Linear has it."""
    hidden, table, targets = torch.randn(6, 4).double(), torch.randn(9, 4).double(), torch.randint(9, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, table, targets)
    assert torch.equal(loss, linear_cross_entropy(hidden, table, targets)) and loss.dtype == torch.float64


@pytest.mark.parametrize("size", [None, 1e-6, 1e5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_keep_their_range_until_they_are_scaled(reduction: Any, size: float | None) -> None:
    """The loss may be divided later, and the weights of the tokens have any size."""
    h, W, targets = problem(20_000, 16, 40, dtype=torch.float32)
    h, W, targets = (4 + h).detach().requires_grad_(), (0.05 * W).detach().requires_grad_(), 0 * targets
    options: dict[str, Any] = {} if size is None else {"token_weight": size * torch.rand(len(h))}
    by = 1.0 if reduction == "mean" else float(options.get("token_weight", torch.ones(len(h))).sum())
    low = h.detach().half().requires_grad_(), W.detach().half().requires_grad_()
    options["reduction"] = reduction
    expected = torch.autograd.grad(dense(h, W, targets, **options) / by, (h, W))
    found = torch.autograd.grad(linear_cross_entropy(*low, targets, **options) * (2.0**10 / by), low)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.float16 and relative(ours.float() / 2**10, exact) < 3e-3
