"""The contract of a token interface."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.testing._assertions import assert_close, assert_equal, assert_gradient, assert_interface_consistent
from manifold_tying.testing._laws import Draw, Law, NotApplicable, check
from manifold_tying.testing._strategies import SEEDS, ambient, token_ids
from manifold_tying.tying import TokenInterface

CHAIN = 1e3  # error growth of a product with T and a solve, from cond(T) after a few steps
SHAPES: tuple[tuple[int, ...], ...] = ((2,), (), (0,), (2, 3), (2, 0))


@dataclass(frozen=True)
class Subject:
    """The interface's factory, and whether it claims W_out E = I."""

    make: Callable[[], TokenInterface]
    consistent: bool

    def moved(self, draw: Draw) -> TokenInterface:
        """A float64 interface after zero or more training steps."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw(SEEDS, "seed"))
            interface = self.make().double()
        _train(interface, draw(SEEDS, "training seed"), draw(st.sampled_from([2, 0, 8]), "training steps"))
        return interface


def _train(interface: TokenInterface, seed: int, steps: int) -> None:
    optimizer = RiemannianAdam(param_groups(interface), lr=0.02)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids, targets = torch.randint(interface.vocab_size, (2, 7), generator=generator)
        optimizer.zero_grad()
        interface.loss(interface.embed(ids), targets).backward()
        optimizer.step()


def _hidden(interface: TokenInterface, draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw(ambient((*shape, interface.hidden_size)), "hidden")


def _tables_have_their_shapes(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    E, W_out = interface.materialize()
    V, d = interface.vocab_size, interface.hidden_size
    if (E.shape, W_out.shape) != ((V, d), (d, V)):
        raise AssertionError(f"expected E {(V, d)} and W_out {(d, V)}, got {tuple(E.shape)}, {tuple(W_out.shape)}")
    if E.requires_grad or W_out.requires_grad:
        raise AssertionError("materialize() returns tables with requires_grad")


def _embed_is_rows_of_the_table(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    ids = draw(token_ids(interface.vocab_size), "ids")
    assert_close(interface.embed(ids), interface.materialize()[0][ids], "embed(ids) - E[ids]", CHAIN)
    assert_close(interface(ids), interface.embed(ids), "interface(ids) - embed(ids)")


def _logits_are_the_product(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    hidden = _hidden(interface, draw, draw(st.sampled_from(SHAPES), "shape"))
    logits = interface.logits(hidden)
    assert_close(logits, hidden @ interface.materialize()[1], "logits(h) - h W_out", CHAIN)
    assert_close(interface(hidden, head=True), logits, "interface(h, head=True) - logits(h)")


def _gradients_are_difference_quotients(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    ids, hidden = torch.arange(interface.vocab_size), _hidden(interface, draw, (3,)).requires_grad_()
    inputs = [hidden, *(p for p in interface.parameters() if p.requires_grad)]
    for output in (partial(interface.embed, ids), partial(interface.logits, hidden)):
        assert_gradient(output, inputs)


def _loss_is_the_cross_entropy(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    targets = draw(token_ids(interface.vocab_size), "targets")
    ignored = draw(st.sampled_from([-100, 0]), "ignore_index")
    if targets.numel() and draw(st.booleans(), "ignores the first target"):
        targets.view(-1)[0] = ignored
    hidden = _hidden(interface, draw, tuple(targets.shape)).requires_grad_()
    trained = [p for p in interface.parameters() if p.requires_grad]
    loss = interface.loss(hidden, targets, ignore_index=ignored)
    counted = targets != ignored
    if not counted.any():
        assert_close(loss, torch.zeros_like(loss), "the loss of no target")
        return
    expected = F.cross_entropy(interface.logits(hidden)[counted], targets[counted])
    assert_close(loss.double(), expected, "loss - cross_entropy(logits)", 1e9 if loss.dtype == torch.float32 else CHAIN)
    ours, theirs = (
        torch.autograd.grad(value, [hidden, *trained], allow_unused=True, materialize_grads=True)
        for value in (loss, expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "the gradient of loss, minus that of cross_entropy(logits)", 1e7)


def _tables_are_copies(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    before = [table.clone() for table in interface.materialize()]
    for table in interface.materialize():
        table.zero_()
    assert_equal(interface.materialize(), before, "the tables after writing to materialized ones")


def _state_dict_keeps(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    other = subject.make().double()
    other.load_state_dict(interface.state_dict())
    assert_equal(other.materialize(), interface.materialize(), "the tables of an interface that loaded the state_dict")


def _copies_are_independent(subject: Subject, draw: Draw) -> None:
    interface = subject.moved(draw)
    twin, before = copy.deepcopy(interface), interface.materialize()
    assert_equal(twin.materialize(), before, "the tables of a deep copy")
    _train(twin, draw(SEEDS, "training seed"), 1)
    assert_equal(interface.materialize(), before, "the tables of an interface whose deep copy was trained")


def _wrong_ids_are_refused(subject: Subject, draw: Draw) -> None:
    interface = subject.make()
    for wrong in (torch.ones(2), torch.tensor([True]), torch.tensor([interface.vocab_size]), torch.tensor([-1])):
        try:
            interface.embed(wrong)
        except (ValueError, IndexError):
            continue
        raise AssertionError(f"embed accepts {wrong}, expected ids from 0 to {interface.vocab_size - 1}")


def _interface_is_consistent(subject: Subject, draw: Draw) -> None:
    if not subject.consistent:
        raise NotApplicable
    assert_interface_consistent(*subject.moved(draw).materialize())


INTERFACE_LAWS: tuple[Law[Subject], ...] = (
    Law("materialize returns E and W_out", _tables_have_their_shapes),
    Law("materialized tables are copies", _tables_are_copies),
    Law("embed looks up rows of E", _embed_is_rows_of_the_table),
    Law("logits are h W_out", _logits_are_the_product),
    Law("gradients match finite differences", _gradients_are_difference_quotients),
    Law("loss is the cross-entropy of logits", _loss_is_the_cross_entropy),
    Law("invalid ids are rejected", _wrong_ids_are_refused),
    Law("state_dict preserves the tables", _state_dict_keeps),
    Law("deep copies are equal and independent", _copies_are_independent),
    Law("W_out E = I", _interface_is_consistent),
)


def check_token_interface(
    make: Callable[[], TokenInterface], *, consistent: bool = False, skip: Collection[str] = ()
) -> None:
    """Check every law of ``INTERFACE_LAWS`` in float64, before and after a few training steps.

    Args:
        make: builds a small interface with random weights from torch's default generator.
        consistent: claim that W_out E = I, as for PIT.
        skip: names of laws to leave out.

    Raises:
        BrokenLaws: names each broken law and the smallest example.
        ValueError: a name in ``skip`` is not a law.

    >>> check_token_interface(lambda: PIT(9, 4, memory="trainable"), consistent=True)
    """
    __tracebackhide__ = True
    check(INTERFACE_LAWS, Subject(make, consistent), type(make()).__name__, skip)
