"""A stateful test of constrained models."""

import copy
import io
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from manifold_tying.manifolds import Stiefel
from manifold_tying.optim import RiemannianAdam, RiemannianSGD, param_groups
from manifold_tying.parametrizations import (
    CayleyFactor,
    CholeskySPD,
    OnManifold,
    OrthonormalFactor,
    constraints,
    manifold_of,
    materialize,
    parametrized,
    spd,
)
from manifold_tying.poet import Equivalence, equivalence, merge
from manifold_tying.testing._assertions import (
    assert_interface_consistent,
    assert_orthonormal,
    assert_same_spectrum,
    assert_spd,
)
from manifold_tying.testing._manifold_subject import assert_on_manifold
from manifold_tying.testing._strategies import SEEDS, constrained_layers, token_interfaces
from manifold_tying.tying import PIT

ORTHONORMAL = OrthonormalFactor | CayleyFactor


def _narrow(weight: Tensor) -> Tensor:
    """Round float64 to float32: a model converted from float32 keeps its rounding errors."""
    return weight.float() if weight.dtype == torch.float64 else weight


class ConstraintMachine(RuleBasedStateMachine):
    """Trains, saves, loads, copies, converts, merges, freezes, assigns and materializes a constrained model in any order.

    The model consists of random constrained layers and a token interface; override :meth:`make_model` to test your own.
    After every rule :meth:`constraints_hold` checks all constrained weights. Add rules with hypothesis' ``@rule()``. Run the
    machine as a unittest: ``TestMine = MyMachine.TestCase``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def make_model(self, data: st.DataObject) -> nn.Module:
        """The initial model; ``data.draw(strategy)`` draws examples."""
        layers = data.draw(st.lists(constrained_layers(), min_size=1, max_size=2))
        if data.draw(st.booleans()):
            layers += [spd(nn.Linear(4, 4), "weight"), equivalence(nn.Linear(4, 6), block_size=2, terms=None)]
        return nn.ModuleList([*layers, data.draw(token_interfaces())])

    @initialize(data=st.data(), momentum=st.booleans())
    def start(self, data: st.DataObject, momentum: bool) -> None:
        """Build the model and an optimizer."""
        self.model = self.make_model(data)
        self.momentum = momentum
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        groups = param_groups(self.model)
        # At ten times SGD's rate, softplus drives the diagonal of L, and so T⁻¹, out of float32's range in a hundred steps.
        self.optimizer = (
            RiemannianSGD(groups, lr=0.003, momentum=0.9) if self.momentum else RiemannianAdam(groups, lr=0.03)
        )

    @rule(seed=SEEDS, steps=st.integers(1, 3), size=st.sampled_from([1.0, 0.0, 10.0]))
    def train(self, seed: int, steps: int, size: float) -> None:
        """Take steps with random gradients."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for p in self.model.parameters():
                if p.requires_grad:
                    p.grad = size * torch.randn(p.shape, generator=generator).to(p.dtype)
            self.optimizer.step()
        self.optimizer.zero_grad()

    @rule()
    def save_and_load(self) -> None:
        """Save model and optimizer, and load them into a copy whose weights were overwritten."""
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file := io.BytesIO())
        file.seek(0)
        weights, state = torch.load(file, weights_only=False)
        before = self._weights()
        self.model = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(p.roll(1, 0))
        self.model.load_state_dict(weights)
        self._new_optimizer()
        self.optimizer.load_state_dict(state)
        self._require_unchanged(before, "saving and loading")

    @rule()
    def deep_copy(self) -> None:
        """Continue with a deep copy."""
        before = self._weights()
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self._require_unchanged(before, "a deep copy")

    @rule(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    def change_dtype(self, dtype: torch.dtype) -> None:
        """Convert the model, and build an optimizer for its new parameters."""
        self.model.to(dtype)
        self._new_optimizer()

    @rule(index=st.integers(0, 100))
    def freeze_or_unfreeze(self, index: int) -> None:
        """Toggle one parameter's requires_grad and make a new optimizer. At least one parameter stays trainable."""
        parameters = list(self.model.parameters())
        p = parameters[index % len(parameters)]
        p.requires_grad_(not p.requires_grad or sum(p.requires_grad for p in parameters) == 1)
        self._new_optimizer()

    @precondition(lambda self: any(True for _ in constraints(self.model)))
    @rule(index=st.integers(0, 100), seed=SEEDS)
    def assign(self, index: int, seed: int) -> None:
        """Assign a random value to a constrained weight, which projects it. SPD weights and L of T = L Lᵀ get valid ones."""
        found = [owner_and_name[1:] for owner_and_name in constraints(self.model)]
        owner, name = found[index % len(found)]
        weight, constraint = getattr(owner, name), parametrized(owner)[name][0]
        value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(constraint, CholeskySPD):
            value = value @ value.mT + torch.eye(len(value))
        elif name == "cholesky_factor":
            value = value.tril(-1) / 8 + torch.diag(0.5 + value.diagonal().abs())
        setattr(owner, name, value.to(weight.dtype))

    @rule()
    def merge_equivalences(self) -> None:
        """Merge all equivalences (POET), if there are any."""
        merge(self.model)

    @rule()
    def materialize_a_copy(self) -> None:
        """Materialize a copy, and compare its weights."""
        before = self._weights()
        twin = materialize(copy.deepcopy(self.model))
        plain = dict(twin.named_parameters())
        for path, weight in before.items():
            assert torch.equal(plain[path], weight), f"materialize changes {path}"

    @invariant()
    def constraints_hold(self) -> None:
        """Check orthonormal and positive definite weights, spectra of equivalences, and W_out E = I of PIT."""
        if not hasattr(self, "model"):
            return
        for _, owner, name in constraints(self.model):
            parts = parametrized(owner)[name]
            constraint: Any = parts[0]
            if isinstance(constraint, OnManifold):
                manifold = manifold_of(parts.original)
                assert manifold is constraint.manifold, f"the point {name} is not known as one"
                if not isinstance(manifold, Stiefel):
                    assert_on_manifold(manifold, _narrow(parts.original.detach()))
                    continue
            if isinstance(constraint, OnManifold | ORTHONORMAL):
                weight = getattr(owner, name).detach()
                assert_orthonormal(_narrow(constraint.layout.to_matrix(weight).to(weight.dtype)))
            elif isinstance(constraint, CholeskySPD):
                assert_spd(_narrow(getattr(owner, name)))
            elif isinstance(constraint, Equivalence):
                assert_same_spectrum(getattr(owner, name), constraint.base)
        for module in self.model.modules():
            if isinstance(module, PIT):
                with torch.no_grad():
                    assert_interface_consistent(*(_narrow(table) for table in module.materialize()))

    def _weights(self) -> dict[str, Tensor]:
        return {path: getattr(owner, name).detach().clone() for path, owner, name in constraints(self.model)}

    def _require_unchanged(self, before: dict[str, Tensor], what: str) -> None:
        for path, weight in self._weights().items():
            assert torch.equal(weight, before[path]), f"{what} changes {path}"
