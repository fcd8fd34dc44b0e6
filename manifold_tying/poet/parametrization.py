"""Orthogonal equivalence: W = R W0 P with W0 fixed, R and P orthogonal and close to the identity. (POET, section 3.)"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manifold_tying import autograd, distributed, precision
from manifold_tying.parametrizations import Constraint, Layout, constraints, parametrized
from manifold_tying.poet.columns import uses_triton
from manifold_tying.poet.linear import arrange, arrange_back, poet_linear, poet_weight, prefers_input_centric
from manifold_tying.poet.rotation import Side, both_blocks, deviation
from manifold_tying.poet.spec import Permutations, RotationSpec, inverse_order

_MAX_DEVIATION = 1e-3
_TWICE = "a place is taken twice; were integer buffers averaged? Average mt.materialize(copy.deepcopy(model))"


class Equivalence(Constraint):
    """W = R W0 P. The stored tensor is the skew vector: R's parameters, then P's; zeros mean R = P = I.

    Buffers: ``ordered_base``, W0 as a matrix in the layer's dtype, with rows and columns in rotation order, so that activations
    are permuted only at the input and the output; ``out_places`` and ``in_places``, the place of each row and column in that
    order (empty if none rotates); ``seed`` and ``merges``, which determine the next ones.
    """

    call = "equivalence"
    ordered_base: Tensor
    out_places: Tensor
    in_places: Tensor
    seed: Tensor
    merges: Tensor
    _checked: tuple[Any, ...] = (None,)  # what :attr:`places` has checked: identities and versions, and the places
    cached: tuple[Tensor, int, Tensor] | None = None  # the stored vector, its version and W, see :func:`cached_weights`

    def __init__(self, layout: Layout, dtype: torch.dtype, spec: RotationSpec, seed: int, like: Tensor):
        super().__init__(dtype)
        self.layout = layout
        self.spec = spec
        self._initial_seed = seed
        self.register_buffer("seed", torch.tensor(seed, device=like.device))
        self.register_buffer("merges", torch.tensor(0, device=like.device))
        for name, side in (("out_places", spec.R), ("in_places", spec.P)):
            size = side.n if side.num_rotated else 0
            self.register_buffer(name, torch.empty(size, dtype=torch.int64, device=like.device))
        self._set_places(seed, 0)
        self.register_buffer("ordered_base", torch.empty(layout.matrix_shape, dtype=dtype, device=like.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.seed.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.seed.is_meta:  # to_empty: draw what the constructor could not store
            self.seed.fill_(self._initial_seed)
            self.merges.zero_()
            self._set_places(self._initial_seed, 0)
        return self

    def layer_dtype_tensors(self) -> list[Tensor]:
        return [self.ordered_base]

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """``out_places`` and ``in_places``. ValueError if someone wrote to them what are no permutations."""
        both = self.out_places, self.in_places
        if not (torch.compiler.is_compiling() or autograd.in_transform()):
            now = (id(self), *((id(place), version_of(place)) for place in both))  # a deep copy has another id
            if now != self._checked[0]:
                if any(map(_taken_twice, both)):
                    raise ValueError(f"{self.describe()}: {_TWICE}")
                self._checked = (now, both)
        return both

    @property
    def perms(self) -> Permutations:
        """Permutations of W's rows and columns to rotation order."""
        return Permutations.of(*self.places)

    @property
    def base(self) -> Tensor:
        """A copy of W0 in the layer's order."""
        return arrange_back(self.ordered_base, self.perms).view(self.layout.shape)

    def _to_rotation_order(self, base: Tensor) -> Tensor:
        """W0 from the layer's shape to a matrix in rotation order."""
        return arrange(base.reshape(self.layout.matrix_shape), self.perms)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # New places without a W0 that can be loaded leave W0 as it is.
        found = state.get(f"{prefix}ordered_base")
        kept = found is None or found.shape != self.ordered_base.shape or not autograd.has_data(found)
        base = self.base if kept and f"{prefix}out_places" in state else None
        for side in ("out_places", "in_places"):
            place = state.get(f"{prefix}{side}")
            if place is not None and _taken_twice(place):
                rest[-1].append(f"{prefix}{side}: {_TWICE}")
                return
        super()._load_from_state_dict(state, prefix, *rest)
        self.dtype = self.ordered_base.dtype  # assign=True may have brought another
        if base is not None:
            self.ordered_base.copy_(self._to_rotation_order(base))

    def sides(self, stored: Tensor) -> tuple[Side, Side]:
        """Blocks and orders of R and P, without gradients."""
        with torch.no_grad():
            R, P = both_blocks(self.spec, stored)
        rows, columns = map(inverse_order, self.places)
        return (R, rows[: self.spec.R.num_rotated]), (P, columns[: self.spec.P.num_rotated])

    def forward(self, stored: Tensor) -> Tensor:
        W = poet_weight(self.ordered_base, stored, self.spec, self.perms)
        return W.view(self.layout.shape).to(self.dtype)

    def linear(self, x: Tensor, tensors: list[Tensor], bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias by the cheaper formulation; x (..., n) must have the layer's dtype unless autocast is on."""
        (stored,), dtype = tensors, precision.autocast_dtype(x)
        autocast = precision.is_autocast_on(x.device) and dtype.itemsize < 4
        if x.ndim < 1 or x.shape[-1] != self.spec.P.n or not (autocast or dtype == self.dtype):
            raise ValueError(
                f"expected inputs (..., {self.spec.P.n}) in {self.dtype}, got {tuple(x.shape)} in {x.dtype}"
            )
        of, version, W = self.cached or (None, 0, None)  # read once: another thread may leave the context
        needs_grad = torch.is_grad_enabled() and stored.requires_grad
        known = of is stored and (torch.compiler.is_compiling() or version == version_of(stored))
        if W is not None and known and W.dtype == dtype and W.requires_grad >= needs_grad:
            return F.linear(x.to(dtype), W, None if bias is None else bias.to(dtype))
        triton = uses_triton(x, stored, self.spec)
        any_number = autograd.is_exporting()  # of tokens: nothing may depend on it
        input_centric = triton or (
            not any_number
            and prefers_input_centric(
                x.numel() // x.shape[-1],
                self.spec,
                training=needs_grad,
                low_precision=dtype.itemsize < stored.dtype.itemsize,
            )
        )
        return poet_linear(
            x, self.ordered_base, stored, self.spec, self.places, bias, input_centric=input_centric, triton=triton
        )

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Make the weight the new base, with R and P the identity."""
        if autograd.has_data(weight):
            precision.check_finite(weight)
        self.ordered_base.copy_(self._to_rotation_order(weight))
        dtype = precision.compute_dtype(self.ordered_base.dtype)
        return torch.zeros(*self.layout.matrix_shape[:-2], self.spec.num_params, dtype=dtype, device=weight.device)

    @torch.no_grad()
    def merge_(self, stored: Tensor) -> None:
        """W0 <- R W0 P, stored vector <- 0 in place, permutations <- the next ones."""
        W = poet_weight(self.ordered_base, stored, self.spec, self.perms)
        stored.zero_()
        self.merges += 1
        self._set_places(int(self.seed), int(self.merges))
        self.ordered_base.copy_(self._to_rotation_order(W))

    @staticmethod
    def warn_on_drift(found: Sequence[tuple[str, "Equivalence", Tensor]]) -> None:
        check_drift(found)

    def _set_places(self, seed: int, count: int) -> None:
        """Draw the dimensions that rotate after ``count`` merges."""
        self.out_places.copy_(inverse_order(self.spec.R.sample_permutation(seed, count, "out")))
        self.in_places.copy_(inverse_order(self.spec.P.sample_permutation(seed, count, "in")))

    def extra_repr(self) -> str:
        R, P = self.spec.R, self.spec.P
        rows, columns = f"{R.num_rotated}/{R.n} by {R.block}", f"{P.num_rotated}/{P.n} by {P.block}"
        return f"rows={rows}, columns={columns}, terms={self.spec.terms}"


def _taken_twice(place: Tensor) -> bool:
    return autograd.has_data(place) and len(place.unique()) != len(place)


def version_of(x: Tensor) -> int:
    """How often x was written in place; 0 for an inference tensor, which does not count."""
    return 0 if x.is_inference() else x._version


def equivalences(module: nn.Module) -> list[tuple[str, Equivalence, Tensor]]:
    """(full name, constraint, stored vector) of every equivalence in module."""
    found = []
    for path, owner, name in constraints(module):
        parts = parametrized(owner)[name]
        found += [(path, part, parts.original) for part in parts if isinstance(part, Equivalence)]
    return found


def merge_all(found: Sequence[tuple[str, Equivalence, Tensor]]) -> None:
    """Merge all, or none if a vector is not finite; warn about the worst if one is not orthogonal to within 1e-3."""
    # Every rank has all of W0: gather the sharded vectors, then each rank merges identically.
    vectors = [(path, part, distributed.full_tensor(stored.detach())) for path, part, stored in found]
    if bad := [path for path, _, vector in vectors if not vector.isfinite().all()]:
        raise ValueError(f"the skew vectors of {', '.join(bad)} hold NaN or Inf; nothing was merged")
    check_drift(vectors)
    for (_, part, vector), (_, _, stored) in zip(vectors, found, strict=True):
        part.merge_(vector)
        distributed.to_local(stored.detach()).zero_()
        stored.grad = None


def check_drift(found: Sequence[tuple[str, Equivalence, Tensor]]) -> None:
    """Warn about the equivalence whose R and P are furthest from orthogonal, if by more than 1e-3."""
    deviations = [
        (deviation(part.spec, distributed.full_tensor(stored)), path)
        for path, part, stored in found
        if part.spec.terms is not None and not stored.is_meta
    ]
    worst, name = max(deviations, default=(0.0, ""))
    if worst > _MAX_DEVIATION:
        warnings.warn(
            f"{name}: the skew matrices have grown, so R and P are only orthogonal to {worst:.1g} and the singular values "
            "drift; lower the learning rate, merge more often, or take more terms (terms=None is exact)",
            stacklevel=4,  # the caller of merge or materialize
        )
