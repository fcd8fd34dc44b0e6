"""Weights that are points of a manifold, which a Riemannian optimizer moves."""

from collections.abc import Callable
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from manifold_tying import autograd, precision
from manifold_tying._geoopt import geoopt
from manifold_tying.manifolds import Of, Retraction, Sphere, Stiefel, norms
from manifold_tying.parametrizations._constraint import Constraint
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._project import OFF
from manifold_tying.parametrizations._register import register

M = TypeVar("M", bound=nn.Module)
_STIEFEL = Stiefel | geoopt.Stiefel


class OnManifold(Constraint):
    """The stored tensor is the point; the weight has the same values in the layer's shape."""

    def __init__(self, layout: Layout, dtype: torch.dtype, manifold: geoopt.Manifold) -> None:
        super().__init__(dtype)
        self.layout = layout
        self.manifold = manifold

    def describe(self) -> str:
        if isinstance(self.manifold, _STIEFEL):
            return f"stiefel on {self.layout}"  # any retraction: it does not change what the stored tensor means
        options = self.manifold.extra_repr()
        return f"constrain({type(self.manifold).__name__}{f'({options})' if options else ''}) on {self.layout}"

    def forward(self, stored: Tensor) -> Tensor:
        return self.layout.to_weight(stored).to(self.weight_dtype(stored))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before, was_meta = self.manifold.state_dict(), self.form.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.form.is_meta:  # to_empty: keep what is known, and mark the rest
            for key, tensor in self.manifold.state_dict().items():
                tensor.fill_(torch.nan) if before[key].is_meta else tensor.copy_(before[key])
        return self

    def right_inverse(self, weight: Tensor) -> Tensor:
        matrix = self.layout.to_matrix(weight)
        if not autograd.has_data(matrix):
            return torch.empty_like(matrix)
        if unknown := [key for key, tensor in self.manifold.state_dict().items() if tensor.isnan().any()]:
            raise ValueError(
                f"expected {self.manifold} to know its {', '.join(unknown)}, got NaN: made on the meta device, they have no "
                "values. Load a state dict, or give them to the constraint"
            )
        try:
            point: Tensor = self.manifold.projx(matrix)
            ok, reason = self.manifold.check_point_on_manifold(point, atol=OFF, rtol=OFF, explain=True)
        except (RuntimeError, TypeError) as error:  # such as a manifold of complex matrices on a real weight
            raise ValueError(
                f"expected {self.manifold} to have points of {weight.dtype} and shape {tuple(weight.shape)}, but its projx or "
                f"its check failed: {error}"
            ) from error
        if not ok:
            raise ValueError(
                f"expected projx of {self.manifold} to give a point of this weight of shape {tuple(weight.shape)}, but it is "
                f"off by more than {OFF}: {reason}. Give the weight values that have a nearest point (zeros may have none), "
                "or correct the manifold; manifold_tying.testing.check_manifold tests it"
            )
        return point.clone(memory_format=torch.contiguous_format)  # projx may have returned the weight itself


def constrain(module: M, name: str, manifold: geoopt.Manifold, *, blocks: int | None = None) -> M:
    """Keep ``module.name`` on any manifold: the stored tensor is the point, and a Riemannian optimizer moves it.

    All is as for :func:`stiefel`, which is the case ``manifold=Stiefel()``; the manifold's ``projx`` projects weights.

    On Stiefel (ours and geoopt's) a convolution is flattened to a matrix and a wide matrix is transposed. On our Sphere a
    convolution is flattened. On any other manifold the point has the weight's own shape: the last ``manifold.ndim`` dimensions
    are one point, the others a batch.

    A manifold's tensors, such as a curvature, become part of the layer and of its state dict. Other options that change what a
    point means belong into its ``extra_repr``: a state dict of another class or ``extra_repr`` is refused.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        manifold: a ``geoopt.Manifold`` of this package, of geoopt or of your own.
        blocks: number of matrices that the weight stacks along its rows, each then a point of its own.

    Raises:
        ValueError: ``manifold`` is no manifold, is Euclidean, does not have points of the weight's shape, or its ``projx`` does
            not give one to within 1e-3; ``name`` and ``blocks`` as for :func:`stiefel`.

    >>> layer = constrain(nn.Linear(4, 4), "weight", geoopt.SymmetricPositiveDefinite())
    """
    if not isinstance(manifold, geoopt.Manifold) or isinstance(manifold, geoopt.Euclidean):
        kind = f"the class {manifold.__name__}" if isinstance(manifold, type) else f"a {type(manifold).__name__}"
        raise ValueError(
            f"expected a geoopt.Manifold other than Euclidean, such as manifold_tying.Stiefel(), got {kind}; "
            "docs/testing.md shows how to write one"
        )
    if isinstance(manifold, _STIEFEL):
        layout = Layout.orthonormal(module, name, blocks)
    else:
        layout = Layout.unchanged(module, name, blocks, flatten=isinstance(manifold, Sphere))
    return _keep_on(module, name, manifold, layout)


def stiefel(module: M, name: str = "weight", *, retraction: Retraction = "polar", blocks: int | None = None) -> M:
    """Keep ``module.name`` on the Stiefel manifold: the stored tensor is the point, and a Riemannian optimizer moves it.

    The weight is projected to the nearest matrix with orthonormal columns (orthonormal rows if it is wide). The forward
    costs nothing extra. Train with :mod:`manifold_tying.optim`: ``RiemannianAdam(model.parameters())`` or
    ``param_groups(model)``. Any other optimizer, geoopt's included, leaves the manifold and warns at its first step.

    Works on Linear, Embedding, convolutions (flattened to a matrix from their second dimension on), MultiheadAttention's
    ``in_proj_weight``, recurrent layers and stacks of matrices (leading dimensions are batch dimensions). In a bfloat16
    layer the point is stored in float32 and cast on access.

    The layer's ``reset_parameters`` projects the new weight, and so does an assignment, ``layer.weight = tensor``. A write in
    place, such as nn.init's, does not: a Riemannian optimizer projects the point at its next step. In a bfloat16 layer, and
    where ``blocks`` stacks wide matrices, the weight is a copy, and a write to it is lost, with a warning at the next access.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        retraction: how the optimizer moves the point, see :class:`manifold_tying.Stiefel`.
        blocks: number of matrices that the weight stacks along its rows, each constrained separately: 4 for an LSTM, 3 for a
            GRU and for MultiheadAttention's ``in_proj_weight``, ``groups`` for a grouped convolution. By default the weight is
            constrained as one matrix; if it stacks several, none of them is orthonormal and a warning says so.

    Raises:
        ValueError: unknown retraction; blocks do not divide the rows; ``name`` is not a parameter of the module itself, is
            shared with another module, is constrained already, or is not a finite floating tensor with at least 2 dimensions.

    >>> layer = stiefel(nn.Linear(16, 64))
    >>> torch.allclose(layer.weight.T @ layer.weight, torch.eye(16), atol=1e-5)
    True
    """
    return _keep_on(module, name, Stiefel(retraction), Layout.orthonormal(module, name, blocks))


def sphere(module: M, name: str = "weight", *, of: Of = "rows", radius: float | Tensor | None = None) -> M:
    """Keep the norms of the rows of ``module.name``, or of its columns, or of the whole matrix, while it is trained.

    The stored tensor is a point of :class:`manifold_tying.Sphere`. By default the norms are those that the weight has now: they
    are in the state dict, and assigned weights are scaled to them. All else is as for :func:`stiefel`. A convolution is
    flattened, so that a row makes one output channel (of a transposed convolution: takes one input channel).

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        of: "rows", "columns" or "matrix", as for :class:`manifold_tying.Sphere`.
        radius: the norm, a tensor of norms, or None for the present ones. On the meta device give it, or load a state dict.

    Raises:
        ValueError: unknown ``of``; a row, column or matrix is zero; ``radius`` does not fit; ``name`` as for :func:`stiefel`.

    >>> layer = sphere(nn.Linear(16, 64), radius=1.0)
    >>> torch.allclose(layer.weight.norm(dim=1), torch.ones(64))
    True
    """
    manifold = Sphere(of, 1.0 if radius is None else radius)
    layout = Layout.unchanged(module, name, None, flatten=True)
    if radius is None:
        matrix = layout.to_matrix(getattr(module, name).detach())
        present = norms(matrix, of).to(matrix.dtype)
        if autograd.has_data(matrix) and (zeros := int((present == 0).sum())):
            raise ValueError(
                f"expected the {of} of {type(module).__name__}.{name} {layout} to have a direction, but {zeros} of "
                f"{present.numel()} are zero, as an embedding's padding is; give them values first"
            )
        manifold = Sphere(of, present)
    return _keep_on(module, name, manifold, layout)


def _keep_on(module: M, name: str, manifold: geoopt.Manifold, layout: Layout) -> M:
    weight = getattr(module, name)
    point = layout.to_matrix(weight.detach().to("meta"))
    ok, reason = manifold.check_point(point, explain=True)
    if not ok:
        raise ValueError(
            f"expected {type(module).__name__}.{name} of shape {layout} to hold points of {manifold}, but their shape would be "
            f"{tuple(point.shape)}: {reason}. Choose a manifold of that shape, or `blocks` that split the rows"
        )
    if autograd.has_data(weight):
        manifold.to(weight.device, precision.compute_dtype(weight.dtype))
    return register(module, name, OnManifold(layout, weight.dtype, manifold))
