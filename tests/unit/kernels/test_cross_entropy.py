"""The kernel by Triton's interpreter, on a CPU: values and gradients against float64."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from manifold_tying import kernels

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU: test_cuda.py"
)
ROUNDING = {
    torch.float32: 1e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}  # the interpreter rounds bfloat16 towards 0


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manifold_tying.kernels._cross_entropy.BLOCK", 64)


def oracle(logits: Tensor, targets: Tensor, weights: Tensor, form: kernels.LossForm) -> tuple[Tensor, Tensor]:
    x = logits.double().requires_grad_()
    capped = x if form.softcap is None else form.softcap * (x / form.softcap).tanh()
    losses = torch.nn.functional.cross_entropy(capped, targets, reduction="none", label_smoothing=form.label_smoothing)
    losses = weights * (losses + form.z_loss * capped.logsumexp(1) ** 2)
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


FORMS = [kernels.LossForm(), kernels.LossForm(1e-3, 0.1, 30.0), kernels.LossForm(softcap=2.0)]
# Every pair of a dtype, a width and a form once: a Latin square.
CASES = [
    (dtype, V, FORMS[(row + column) % len(FORMS)])
    for row, V in enumerate((1, 2, 63, 64, 65, 200))
    for column, dtype in enumerate(ROUNDING)
]


@interpreted
@pytest.mark.parametrize(("dtype", "V", "form"), CASES)
def test_losses_and_gradients(dtype: torch.dtype, V: int, form: kernels.LossForm) -> None:
    n = 7
    held = torch.full((n, V + 3), 5.0, dtype=dtype)  # rows that lie apart
    logits = held[:, :V].copy_(20 * torch.randn(n, V))
    targets = torch.randint(V, (n,))
    weights = torch.arange(n) % 3 / 2
    expected, gradient = oracle(logits, targets, weights, form)
    targets[weights == 0] = -100
    before = held.clone()
    read = kernels.cross_entropy_(logits, targets, weights, wants_gradient=False, form=form)
    assert torch.equal(held, before)
    written = kernels.cross_entropy_(logits, targets, weights, form=form)
    assert torch.equal(read, written) and read.dtype == torch.float32
    torch.testing.assert_close(read.double(), expected, rtol=2e-6, atol=1e-5)  # of logits up to 60
    torch.testing.assert_close(logits.double(), gradient, rtol=ROUNDING[dtype], atol=2e-7)
    assert (held[:, V:] == 5).all()


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, in the interpreter
def test_infinite_logits_and_targets_out_of_range() -> None:
    logits = torch.randn(4, 150)
    logits[0, :70] = -torch.inf  # a whole block, and the start of the next
    logits[1, 3] = torch.inf
    losses = kernels.cross_entropy_(logits.clone(), torch.tensor([149, 3, 150, -1]), torch.ones(4))
    torch.testing.assert_close(losses[0], -logits[0].log_softmax(0)[149])
    assert losses[1:].isnan().all()


@interpreted
def test_the_loss_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, with infinite hidden states in ignored rows."""
    from manifold_tying.tying import linear_cross_entropy

    hidden, table = torch.randn(200, 6, dtype=torch.float64), torch.randn(90, 6, dtype=torch.float64)
    targets = torch.randint(90, (200,))
    targets[::5] = -100
    exact = [hidden.clone().requires_grad_(), table.clone().requires_grad_()]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].mT, targets)
    hidden[::5] = torch.inf
    own = [t.float().requires_grad_() for t in (hidden, table)]
    kernel = Mock(side_effect=kernels.cross_entropy_)
    monkeypatch.setattr(kernels, "cross_entropy_", kernel)
    monkeypatch.setattr(kernels, "runs_triton", lambda x: True)
    loss = linear_cross_entropy(own[0], own[1], targets)
    assert kernel.call_count > 1
    found = [loss.detach(), *torch.autograd.grad(3 * loss, own)]
    for a, b in zip(found, [expected.detach(), *torch.autograd.grad(3 * expected, exact)], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_nothing_but_a_cuda_device_runs_kernels(place: str) -> None:
    x = torch.zeros(2, 3, device=place)
    assert not kernels.runs_triton(x) and not kernels.runs_eagerly_on_gpu(x)
