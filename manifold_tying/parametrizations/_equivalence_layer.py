"""Orthogonal equivalence on a weight of a layer, and the forward of a linear layer that goes with it."""

from typing import Any, TypeVar, cast

from torch import Tensor, nn

from manifold_tying import linalg
from manifold_tying.parametrizations._equivalence import Equivalence
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._register import register
from manifold_tying.poet.spec import Init, RotationSpec, Scheme, Sides, check_options, initial_matrix, random_seed

M = TypeVar("M", bound=nn.Module)


def equivalence(
    module: M,
    name: str = "weight",
    *,
    scheme: Scheme = "block",
    block_size: int = 256,
    fraction: float | None = None,
    terms: int | None = 2,
    init: Init = "keep",
    seed: int | None = None,
    out_share: float | None = None,
    sides: Sides = "both",
) -> M:
    """Train ``module.name`` as W = R W0 P: W0 stays, the orthogonal R (rows, outputs) and P (columns, inputs) are learned.

    The singular values of W are those of W0, as closely as R and P are orthogonal (see ``terms``). R and P start as the
    identity, so with init="keep" the layer computes what it did: the weight is the same bit for bit, a linear layer's
    output to rounding, since it adds up in another order. The only parameter is a float32 vector of skew entries (float64
    under float64), trained by any optimizer and folded into W0 by :func:`merge` every few hundred steps; everything else is
    buffers. An ``nn.Linear`` never keeps a matrix of W's size for the backward. Shapes as in :func:`stiefel`, but wide
    matrices are not transposed: R always acts on the first dimension of a kernel, P on the rest. W0 has the layer's dtype:
    a bfloat16 layer rounds it at every merge, a float32 one under autocast does not.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        scheme: "block", POET-BS: every dimension rotates, in blocks, the last one smaller where b does not divide; "full",
            POET-FS: one block of random dimensions, the others stay until the next merge.
        block_size: b, clamped to the dimension. b(b-1)/2 parameters per block.
        fraction: scheme "full" only, in place of block_size: b = fraction m for R and fraction n for P.
        terms: of the Neumann series for the Cayley map; None for the exact map. Two terms are orthogonal to ‖A‖⁶: enough where
            merges and the learning rate keep ‖A‖ below 0.3. Take None for finetuning and wherever the rate is not tuned.
        init: of W0: "keep"; "normalized", Gaussian with rows of norm 1 (POET's own for pretraining); "uniform-spectrum",
            Gaussian with every singular value set to 1; "xavier", N(0, 2/(m + n)); "standard", N(0, 0.02²) as Llama's.
        seed: of the orders and of a random init; drawn from torch's generator when None.
        out_share: share of the parameters that goes to R, by the choice of its block size: 1.0 only R, 0.0 only P, None the
            same block size (or fraction) on both sides. (POET, figure 5.) The number of parameters stays, so a side that
            takes the other's share gets larger blocks.
        sides: which sides rotate, in blocks of ``block_size``: "both", "in" (P alone, the inputs: orthogonal finetuning) or
            "out" (R alone).

    Raises:
        ValueError: an option out of its range; blocks so small that nothing rotates; ``name`` as for :func:`stiefel`.

    >>> layer = equivalence(nn.Linear(64, 32), block_size=16)
    >>> sum(p.numel() for p in layer.parametrizations.parameters()) == (64 + 32) * 15 // 2
    True
    """
    check_options(scheme, block_size, fraction, terms, init, seed, out_share, sides)
    layout = Layout.of(module, name)
    weight = getattr(module, name)
    rows, columns = layout.matrix_shape[-2:]
    spec = RotationSpec.of(rows, columns, scheme, block_size, fraction, out_share, sides, terms)
    if not spec.num_params:
        raise ValueError(
            f"a matrix of {rows} x {columns} with blocks of {spec.R.block} and {spec.P.block} has nothing to rotate; "
            "choose a larger block_size, fraction or share, or other sides"
        )
    if seed is None:
        seed = random_seed()
    start = None if init == "keep" else initial_matrix(layout.matrix_shape, init, seed).view(layout.shape)
    device, dtype = weight.device, weight.dtype
    register_equivalence(module, name, layout, spec, seed)
    if start is not None:
        setattr(module, name, start.to(device, linalg.working_dtype(dtype)))
    return module


def register_equivalence(module: nn.Module, name: str, layout: Layout, spec: RotationSpec, seed: int) -> Equivalence:
    """Put the constraint on ``module.name``, whose weight becomes W0, and give nn.Linear the forward that goes with it."""
    weight = getattr(module, name)
    part = Equivalence(layout, weight.dtype, spec, seed, weight)
    register(module, name, part)
    if name == "weight" and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        # The class that parametrize made for this one module: copies share it, and materialize drops it.
        setattr(type(module), "forward", _linear_forward)  # noqa: B010 - mypy: a method is not assigned
    return part


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """nn.Linear's forward under an equivalence, and nn.Linear's own where the weight has more or other parametrizations."""
    lists = cast(Any, self).parametrizations
    parts: Any = lists["weight"] if "weight" in lists else []
    if len(parts) == 1 and isinstance(parts[0], Equivalence):
        return parts[0].linear(input, parts.original, self.bias)
    return nn.Linear.forward(self, input)
