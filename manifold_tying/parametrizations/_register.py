"""The functions that make a weight the image of a free tensor, and :func:`materialize`, which removes every constraint."""

from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import distributed, precision
from manifold_tying.parametrizations._cholesky import CholeskySPD, Diagonal
from manifold_tying.parametrizations._constraint import Constraint, Float32ParametrizationList
from manifold_tying.parametrizations._layer_class import adapt_class, own_class, parametrized, share_class
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._orthonormal import CayleyFactor, OrthogonalMap, OrthonormalFactor
from manifold_tying.parametrizations._points import manifold_of, manifolds_in, record
from manifold_tying.parametrizations._project import warn_if_off

M = TypeVar("M", bound=nn.Module)


def orthogonal(
    module: M, name: str = "weight", *, map: OrthogonalMap = "polar", blocks: int | None = None, special: bool = False
) -> M:
    """Make ``module.name`` orthonormal as the image of a free tensor, which any optimizer trains.

    The weight is projected to the nearest matrix with orthonormal columns (orthonormal rows if it is wide); so is every
    assigned weight. A write in place, such as nn.init's, is lost, with a warning at the next access. Shapes are those of
    :func:`stiefel`. The map runs at every access of the weight; wrap repeated accesses
    in ``torch.nn.utils.parametrize.cached()``.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        map: "polar" (nearest orthonormal matrix), "qr", "cayley" (around a base point) or "cayley-neumann" (two terms of a
            Neumann series in place of the inverse, then the polar factor). On a CPU "cayley-neumann" takes 2.3 to 3 times as
            long as "cayley" on squares of 512 to 2048. On a GPU all maps but "cayley" sync at each access, because they
            choose an algorithm by the values.
        blocks: number of matrices that the weight stacks along its rows, as for :func:`stiefel`.
        special: keep the determinant 1, so that the weight is a rotation, SO(n). Square matrices only.

    Raises:
        ValueError: unknown map; ``special`` for other than square matrices; ``name`` and ``blocks`` as for :func:`stiefel`.
    """
    precision.check_choice("map", map, OrthogonalMap)
    layout = Layout.orthonormal(module, name, blocks)
    if special and layout.matrix_shape[-2] != layout.matrix_shape[-1]:
        raise ValueError(
            f"expected {type(module).__name__}.{name} {layout} to be square for special=True, a determinant of 1"
        )
    dtype = getattr(module, name).dtype
    if map == "polar" or map == "qr":
        return register(module, name, OrthonormalFactor(layout, dtype, map, special))
    base = torch.empty_like(layout.to_matrix(getattr(module, name).detach()))
    return register(module, name, CayleyFactor(layout, dtype, base, None if map == "cayley" else 2, special))


def spd(module: M, name: str, *, diagonal: Diagonal = "softplus") -> M:
    """Make the square ``module.name`` symmetric positive definite, T = L Lᵀ. Any optimizer trains it.

    L is lower triangular; its diagonal is the softplus or exp of the stored one. The weight is projected to the nearest
    symmetric positive definite matrix. (PIT, equation 10.)

    T is definite up to rounding: in float32 an eigenvalue below 1e-7 of the largest may come out negative. A random weight
    starts close to that; start from a well-conditioned one, such as the identity, or use float64.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        diagonal: "softplus" or "exp": maps the stored diagonal to positive numbers.

    Raises:
        ValueError: the weight is not square or has no positive eigenvalue; ``name`` as for :func:`stiefel`.
    """
    shape = Layout.of(module, name).shape
    if shape[-1] != shape[-2]:
        raise ValueError(f"expected {type(module).__name__}.{name} to be square for T = L Lᵀ, got {tuple(shape)}")
    return register(module, name, CholeskySPD(diagonal, getattr(module, name).dtype))


def materialize(module: M) -> M:
    """Remove all constraints from ``module`` and its submodules and return it; the weights keep their values.

    Constraints of this package, other parametrizations with an attribute ``manifold``, and geoopt.ManifoldParameters, which
    become plain parameters. Warns of points that are off their manifold, and if R and P of an equivalence are not orthogonal
    to within 1e-3.
    """
    distributed.reshard_fsdp(module)
    warn_if_off(module)
    found, watched = list(constraints(module)), list[tuple[str, Constraint, Tensor]]()
    for path, owner, name in found:
        parts = cast(Float32ParametrizationList, parametrized(owner)[name])
        if not all(isinstance(part, Constraint) for part in parts):
            raise ValueError(f"{path} has other parametrizations over ours; remove those first")
        if distributed.is_dtensor(parts.stored[0]):
            raise ValueError(
                f"{path} is a DTensor; gather the state dict into an unsharded model first, then materialize that"
            )
        watched += [(path, cast(Constraint, part), parts.stored[0]) for part in parts]
    for kind in {type(part) for _, part, _ in watched}:
        kind.warn_on_drift([one for one in watched if type(one[1]) is kind])
    with torch.inference_mode(False), torch.no_grad():
        for _, owner, name in found:
            value = getattr(owner, name)
            own_class(owner)
            parts = cast(Float32ParametrizationList, parametrized(owner)[name])
            weight = cast(nn.Parameter, parts.stored[0])  # the layer's own parameter: torch would leave another one
            parts._parameters.clear()
            parts.is_tensor, parts.ntensors, parts.original = True, 1, weight
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            _replace_stored(getattr(owner, name), value.clone(memory_format=torch.contiguous_format))
    _release_others(module)
    return module


def _release_others(module: nn.Module) -> None:
    """Turn points that are not ours into plain parameters: under other parametrizations, and geoopt.ManifoldParameters."""
    for owner in module.modules():
        if parametrize.is_parametrized(owner):
            for name in [name for name, parts in parametrized(owner).items() if manifolds_in(parts)]:
                own_class(owner)
                parametrize.remove_parametrizations(owner, name)
        if not isinstance(owner, parametrize.ParametrizationList):
            for p in owner.parameters(recurse=False):
                if manifold_of(p, {}) is not None:
                    p.__dict__.pop("manifold", None)
                    p.__class__ = nn.Parameter  # the same object, which an optimizer may hold


def _replace_stored(weight: Tensor, value: Tensor) -> None:
    """Turn a parameter into another tensor, even if its shape or dtype differs."""
    if weight.dtype == value.dtype:
        # set_ also updates the shape that autograd recorded, in case an older graph is still alive.
        weight.set_(value)  # type: ignore[call-overload]
    else:
        weight.data = value
    weight.grad = None  # belonged to the stored tensor


def constraints(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, tensor name) of each tensor in module that has a constraint of this package."""
    for prefix, owner in module.named_modules():
        if not isinstance(owner, parametrize.ParametrizationList) and parametrize.is_parametrized(owner):
            for name, parts in parametrized(owner).items():
                if any(isinstance(part, Constraint) for part in parts):
                    yield (f"{prefix}.{name}" if prefix else name), owner, name


def register(module: M, name: str, constraint: Constraint) -> M:
    """Put a constraint on a parameter that :meth:`Layout.of` accepted; the same parameter becomes the (first) stored tensor."""
    weight = getattr(module, name)
    weight_shape = weight.shape
    label = f"{type(module).__name__}.{name} of shape {tuple(weight_shape)}"
    if parametrize.is_parametrized(module):
        own_class(module)  # a copy of the module must not get the new property
    given = weight.data
    weight.data = given.to(precision.compute_dtype(given.dtype))
    try:
        # unsafe: the stored tensor may have another shape (tall) and dtype (float32) than the weight.
        parametrize.register_parametrization(module, name, constraint, unsafe=True)
    except BaseException:
        weight.data = given  # projection failed: restore the module
        raise
    parts = cast(Float32ParametrizationList, parametrized(module)[name])
    parts.__class__ = Float32ParametrizationList
    parts.label, parts.weight_shape, parts.tensor_name = label, weight_shape, name
    if not parts.is_tensor:
        with torch.no_grad():
            _replace_stored(weight, parts.stored[0].data)
        parts.original0 = weight
    constraint.record_form(weight.device)
    record(parts)
    adapt_class(module, name)
    if name == "weight" and hasattr(constraint, "linear") and type(module).forward is nn.Linear.forward:
        share_class(cast(nn.Linear, module))
    weight.grad = None  # belonged to the plain weight
    return module
