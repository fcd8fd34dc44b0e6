"""Converts weights of any shape to matrices, tall or as they are, and back."""

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manifold_tying import autograd, distributed, precision

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ATTENTION = 3  # matrices that MultiheadAttention stacks in in_proj_weight
GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}

OWN_REFERENCES = 3  # held by the module, by Layout.of and by the argument of getrefcount


@dataclass(frozen=True)
class Layout:
    """A weight as matrices (..., n, p) with n >= p.

    Convolution kernels are flattened from their second dimension on. For any other weight the last two dimensions are the
    matrix and the leading ones are batch dimensions. Wide matrices are transposed. ``blocks`` splits the rows into that many
    separate matrices, along a new batch dimension. Without ``tall`` matrices stay wide if they are.
    """

    shape: torch.Size
    flatten: bool
    blocks: int = 1
    tall: bool = True

    @classmethod
    def of(cls, module: nn.Module, name: str, shared: Container[int] | None = None) -> "Layout":
        """The layout of ``module.name``; ValueError if this parameter cannot be constrained.

        ``shared``: what :func:`shared_parameters` found, if it was asked about many parameters at once.
        """
        kind = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"expected a layer (nn.Module), got a {kind}; for a bare tensor use geoopt.ManifoldParameter(tensor, "
                "manifold=manifold_tying.Stiefel()), or SPD()"
            )
        if name in getattr(module, "parametrizations", {}):
            raise ValueError(
                f"{kind}.{name} is constrained already; call materialize(module) first, or remove_parametrizations of "
                "torch.nn.utils.parametrize if the constraint is not from manifold_tying"
            )
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{kind} renormalizes rows of its weight in place (max_norm={module.max_norm}), which breaks any constraint; "
                "set max_norm to None"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{kind} has sparse gradients, which no constraint takes; set sparse to False")
        weight = module._parameters.get(name)
        if weight is None:
            names = ", ".join(n for n, p in module._parameters.items() if p is not None) or "none"
            raise ValueError(f"{kind} has no parameter {name!r} of its own; its parameters: {names}")
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise ValueError(f"{kind}.{name} has no shape yet; run the module on some input first")
        if distributed.is_dtensor(weight):
            raise ValueError(f"{kind}.{name} is already a DTensor; constrain it first, then shard the model")
        if _is_shared(module, name) if shared is None else id(weight) in shared:
            raise ValueError(
                f"{kind}.{name} is also a parameter under another name (a tied table), which would read the stored tensor. "
                f"Untie it first: module.{name} = nn.Parameter(module.{name}.detach().clone())"
            )
        precision.compute_dtype(weight.dtype)
        if weight.ndim < 2 or 0 in weight.shape:
            raise ValueError(f"expected {kind}.{name} to be a matrix or a stack of matrices, got {tuple(weight.shape)}")
        if autograd.has_data(weight) and not torch.isfinite(weight).all():
            raise ValueError(f"expected {kind}.{name} to be finite, but it contains NaN or Inf")
        return cls(weight.shape, isinstance(module, CONVOLUTIONS))

    @classmethod
    def orthonormal(cls, module: nn.Module, name: str, blocks: int | None) -> "Layout":
        """The layout of a weight that becomes orthonormal in blocks of rows; warns if they are not the matrices it stacks."""
        layout, kind = cls.of(module, name)._split(module, name, blocks), type(module).__name__
        stacked, chosen = _stacked(module, name), blocks in (1, _stacked(module, name))
        if stacked > 1 and not chosen:
            warnings.warn(
                f"{kind}.{name} stacks {stacked} matrices (gates, queries, keys and values, or groups of channels). It becomes "
                f"orthonormal {f'in {blocks} blocks' if layout.blocks > 1 else 'as one matrix'}, so none of them is; pass "
                f"blocks={stacked} to constrain each, or blocks=1 to constrain all as one matrix without this warning",
                stacklevel=3,
            )
        return layout

    @classmethod
    def unchanged(cls, module: nn.Module, name: str, blocks: int | None, *, flatten: bool = False) -> "Layout":
        """The layout of a weight that keeps its shape, but for the blocks of rows; a convolution's may be flattened."""
        layout = cls.of(module, name)
        return replace(layout, flatten=flatten and layout.flatten, tall=False)._split(module, name, blocks)

    def _split(self, module: nn.Module, name: str, blocks: int | None) -> "Layout":
        """The same in blocks of rows."""
        blocks, rows = 1 if blocks is None else blocks, self.matrix_shape[-2]
        precision.check_int("blocks", blocks, 1)
        if rows % blocks:
            label = f"{type(module).__name__}.{name} {tuple(self.shape)}"
            raise ValueError(f"expected blocks to divide the {rows} rows of {label}, got {blocks}")
        return replace(self, blocks=blocks)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(..., m, n) before transposing, wide or tall."""
        shape = (self.shape[0], self.shape[1:].numel()) if self.flatten else tuple(self.shape)
        return shape if self.blocks == 1 else (*shape[:-2], self.blocks, shape[-2] // self.blocks, shape[-1])

    def __str__(self) -> str:
        return f"{tuple(self.shape)}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")

    @property
    def _wide(self) -> bool:
        return self.tall and self.matrix_shape[-2] < self.matrix_shape[-1]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Convert a weight to matrices, contiguous, at least float32."""
        matrix = weight.reshape(self.matrix_shape)
        return (matrix.mT if self._wide else matrix).to(precision.compute_dtype(weight.dtype)).contiguous()

    def to_weight(self, matrix: Tensor) -> Tensor:
        """Convert matrices back to the weight's shape."""
        if matrix.shape == self.shape and not self._wide:
            return matrix  # autograd lets two views that are added share the memory of their gradients
        return (matrix.mT if self._wide else matrix).reshape(self.shape)


def _stacked(module: nn.Module, name: str) -> int:
    """Number of matrices that a weight stacks along its rows."""
    if isinstance(module, CONVOLUTIONS):
        return module.groups
    if name == "in_proj_weight":
        return ATTENTION
    gates = next((count for recurrent, count in GATES.items() if isinstance(module, recurrent)), 1)
    return gates if name.startswith(("weight_hh", "weight_ih")) else 1


def _is_shared(module: nn.Module, name: str) -> bool:
    # Not passed as an argument: Python versions differ in how they count references held by arguments.
    if sys.getrefcount(module._parameters[name]) <= OWN_REFERENCES:  # skips the slow scan of all objects
        return False
    return bool(shared_parameters([module._parameters[name]]))


def shared_parameters(parameters: Sequence[Tensor | None], more_than: int = 1) -> set[int]:
    """The ids of those that modules hold more than once (or ``more_than``), found in at most two scans of all objects."""
    wanted = {id(parameter) for parameter in parameters if parameter is not None}

    def names(holders: list[dict[Any, Any]]) -> set[int]:
        counts = Counter(id(value) for held in holders for value in held.values() if id(value) in wanted)
        return {number for number, count in counts.items() if count > more_than}

    holders = [held for held in gc.get_referrers(*filter(torch.is_tensor, parameters)) if isinstance(held, dict)]
    if not names(holders):
        return set()
    owners = gc.get_referrers(*holders)  # modules, or their __dict__
    attributes = [vars(owner) if isinstance(owner, nn.Module) else owner for owner in owners]
    # A torch.fx graph, such as that of a compiled optimizer step, holds what it reads.
    modules = [found for found in attributes if isinstance(found, dict) and "_graph" not in found]
    own = {id(found.get("_parameters")) for found in modules}
    return names([held for held in holders if id(held) in own])
