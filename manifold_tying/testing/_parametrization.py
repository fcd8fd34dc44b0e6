"""The contract of a constraint registered with torch.nn.utils.parametrize."""

import copy
import io
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.parametrizations import materialize, parametrized
from manifold_tying.testing._assertions import assert_close, assert_equal, assert_gradient
from manifold_tying.testing._laws import Draw, Law, NotApplicable, check, skip_on
from manifold_tying.testing._strategies import SEEDS, ambient

CHAIN = 1e2  # condition numbers of random weights


@dataclass(frozen=True)
class Subject:
    """The constraint, the plain layer, the parameter's name, and an assertion for constrained weights."""

    put_on: Callable[[Any], nn.Module]
    layer: nn.Module
    name: str
    holds: Callable[[Tensor], None] | None

    def build(self, draw: Draw) -> nn.Module:
        """A constrained copy of the layer with a random weight."""
        module = copy.deepcopy(self.layer)
        with torch.no_grad():
            getattr(module, self.name).copy_(draw(ambient(tuple(self.weight(module).shape)), "weight"))
        with skip_on(ValueError):  # of a weight such as -I, which has no nearest positive definite matrix
            return self.put_on(module)

    def moved(self, draw: Draw) -> nn.Module:
        """Like build(), after a few training steps."""
        module = self.build(draw)
        train(module, self.name, draw(SEEDS, "training seed"), draw(st.sampled_from([1, 3]), "training steps"))
        return module

    def assignable(self, draw: Draw) -> nn.Module:
        module = self.moved(draw)
        if not all(hasattr(part, "right_inverse") for part in parametrized(module)[self.name]):
            raise NotApplicable
        return module

    def weight(self, module: nn.Module) -> Tensor:
        """The constrained weight, detached."""
        weight: Tensor = getattr(module, self.name)
        return weight.detach().clone()

    def check_same(self, module: nn.Module, expected: Tensor, what: str) -> None:
        assert_equal([self.weight(module)], [expected], what)

    def check_weight(self, module: nn.Module) -> None:
        if self.holds is None:
            raise NotApplicable
        self.holds(self.weight(module))


def train(module: nn.Module, name: str, seed: int, steps: int) -> None:
    """Take Riemannian Adam steps on random linear losses; for a trivialization this is AdamW."""
    optimizer = RiemannianAdam(param_groups(module), lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        weight = getattr(module, name)
        (weight * torch.randn(weight.shape, generator=generator).to(weight.dtype)).sum().backward()
        optimizer.step()


def _keeps_shape_and_dtype(subject: Subject, draw: Draw) -> None:
    before, after = subject.weight(subject.layer), subject.weight(subject.build(draw))
    if (after.shape, after.dtype) != (before.shape, before.dtype):
        kinds = (f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (before, after))
        raise AssertionError("constraining changes the weight from " + " to ".join(kinds))


def _holds(subject: Subject, draw: Draw) -> None:
    module = subject.build(draw)
    subject.check_weight(module)
    before = subject.weight(module)
    train(module, subject.name, draw(SEEDS, "training seed"), draw(st.sampled_from([1, 3, 20]), "training steps"))
    subject.check_weight(module)
    if before.numel() > 1 and torch.equal(subject.weight(module), before):
        raise AssertionError("training does not move the weight")


def _holds_everywhere(subject: Subject, draw: Draw) -> None:
    """Only for constraints that map any stored tensor; a stored point has a manifold and is skipped."""
    module = replace(subject, layer=copy.deepcopy(subject.layer).double()).build(draw)
    parts: Any = parametrized(module)[subject.name]
    stored = getattr(parts, "original", None)
    if stored is None or hasattr(stored, "manifold") or hasattr(parts[0], "manifold"):
        raise NotApplicable
    size = draw(st.sampled_from([1.0, 50.0]), "size of the stored tensor")
    generator = torch.Generator().manual_seed(draw(SEEDS, "seed of the stored tensor"))
    with torch.no_grad():
        stored.copy_(size * torch.randn(stored.shape, generator=generator))
    subject.check_weight(module)


def _assigning_projects(subject: Subject, draw: Draw) -> None:
    module = subject.assignable(draw)
    weight = subject.weight(module)
    with skip_on(ValueError):
        setattr(module, subject.name, draw(ambient(tuple(weight.shape)), "assigned weight").to(weight.dtype))
    subject.check_weight(module)


def _assigning_itself_changes_nothing(subject: Subject, draw: Draw) -> None:
    module = subject.assignable(draw)
    before = subject.weight(module)
    setattr(module, subject.name, before)
    assert_close(subject.weight(module), before, "module.weight = module.weight", CHAIN)


def _tied_weight_is_kept(subject: Subject, draw: Draw) -> None:
    """Draws nothing: one example suffices, and the search for other owners is slow."""
    module, other = copy.deepcopy(subject.layer), cast(Any, nn.Module())
    other.register_parameter("weight", getattr(module, subject.name))
    before = subject.weight(module)
    try:
        wanted = [before, subject.weight(subject.put_on(module))]
    except ValueError:
        wanted = [before]
    after = other.weight.detach()
    if not any(after.shape == one.shape and torch.allclose(after, one, rtol=1e-4, atol=1e-5) for one in wanted):
        raise AssertionError("another module with the same parameter has neither the old weight nor the new one")


def _state_dict_keeps(subject: Subject, draw: Draw) -> None:
    module, other = subject.moved(draw), subject.build(draw)
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    subject.check_same(other, subject.weight(module), "the weight of a layer that loaded the state_dict")


def _copies_are_equal_and_independent(subject: Subject, draw: Draw) -> None:
    module = subject.moved(draw)
    before, twin = subject.weight(module), copy.deepcopy(module)
    subject.check_same(twin, before, "the weight of a deep copy")
    train(twin, subject.name, draw(SEEDS, "training seed"), 1)
    subject.check_same(module, before, "the weight after training a deep copy")
    _plain(twin)
    subject.check_same(module, before, "the weight after removing the constraint from a deep copy")


def _pickle_keeps_or_refuses(subject: Subject, draw: Draw) -> None:
    module = subject.moved(draw)
    with skip_on(RuntimeError):  # torch's own parametrizations refuse
        dumped = pickle.dumps(module)
    subject.check_same(pickle.loads(dumped), subject.weight(module), "the weight of a pickled layer")


def _dtype_changes_keep(subject: Subject, draw: Draw) -> None:
    module = subject.moved(draw)
    before = subject.weight(module)
    module.double()
    assert_close(subject.weight(module).to(before.dtype), before, "the weight after .double()", CHAIN)
    module.to(before.dtype)
    assert_close(subject.weight(module), before, "the weight after .double() and back", CHAIN)


def _plain_layer_keeps(subject: Subject, draw: Draw) -> None:
    module = subject.moved(draw)
    before = subject.weight(module)
    keys = set(subject.layer.state_dict())
    _plain(module)
    if set(module.state_dict()) != keys or not isinstance(getattr(module, subject.name), nn.Parameter):
        raise AssertionError("after removing the constraint the layer has different parameters than before")
    subject.check_same(module, before, "the weight after removing the constraint")


def _gradients_are_difference_quotients(subject: Subject, draw: Draw) -> None:
    module = subject.moved(draw).double()
    stored = list(parametrized(module)[subject.name].parameters(recurse=False))
    if not stored:
        raise NotApplicable
    assert_gradient(lambda: getattr(module, subject.name), stored)


def _plain(module: nn.Module) -> None:
    """Remove any constraint, ours or another library's."""
    materialize(module)
    if parametrize.is_parametrized(module):
        for name in list(parametrized(module)):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


PARAMETRIZATION_LAWS: tuple[Law[Subject], ...] = (
    Law("shape and dtype are preserved", _keeps_shape_and_dtype),
    Law("the constraint holds, at once and after training", _holds),
    Law("the constraint holds far from the start", _holds_everywhere),
    Law("assigning projects", _assigning_projects),
    Law("assigning the current weight changes nothing", _assigning_itself_changes_nothing),
    Law("a tied weight is kept or refused", _tied_weight_is_kept),
    Law("gradients match finite differences", _gradients_are_difference_quotients),
    Law("state_dict preserves the weight", _state_dict_keeps),
    Law("deep copies are equal and independent", _copies_are_equal_and_independent),
    Law("pickling preserves the weight or is refused", _pickle_keeps_or_refuses),
    Law("dtype changes preserve the weight", _dtype_changes_keep),
    Law("removing the constraint preserves the weight", _plain_layer_keeps),
)


def check_parametrization(
    put_on: Callable[[Any], nn.Module],
    layer: nn.Module,
    name: str = "weight",
    *,
    holds: Callable[[Tensor], None] | None = None,
    skip: Collection[str] = (),
) -> None:
    """Check every law of ``PARAMETRIZATION_LAWS`` on copies of a layer with random weights.

    Args:
        put_on: constrains ``layer.name`` in place through ``torch.nn.utils.parametrize`` and returns the layer.
        layer: a plain layer, float32 or wider. It is not modified.
        name: the constrained parameter.
        holds: raises if a weight violates the constraint, for instance :func:`assert_orthonormal`. If None, the laws that
            need it are skipped.
        skip: names of laws to leave out.

    Raises:
        BrokenLaws: names each broken law and the smallest example.
        ValueError: a name in ``skip`` is not a law; ``put_on`` registers no parametrization of ``layer.name``.

    >>> check_parametrization(orthogonal, nn.Linear(3, 5), holds=assert_orthonormal)
    """
    __tracebackhide__ = True
    label = f"{getattr(put_on, '__name__', 'the constraint')} on {type(layer).__name__}.{name}"
    if not parametrize.is_parametrized(put_on(copy.deepcopy(layer)), name):
        raise ValueError(f"expected put_on to register a parametrization of {type(layer).__name__}.{name}, got none")
    check(PARAMETRIZATION_LAWS, Subject(put_on, layer, name, holds), label, skip)
