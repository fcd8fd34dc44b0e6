"""The functions that make a weight the image of a free tensor, and :func:`materialize`, which removes every constraint."""

import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar, cast, get_args
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import autograd, distributed, precision
from manifold_tying.parametrizations._cholesky import Bounds, CholeskySPD, Diagonal
from manifold_tying.parametrizations._constraint import Constraint, Float32ParametrizationList
from manifold_tying.parametrizations._layout import Layout, shared_parameters
from manifold_tying.parametrizations._orthonormal import CayleyFactor, OrthogonalMap, OrthonormalFactor
from manifold_tying.parametrizations._points import manifold_in, manifold_of, mark, set_owner, stamp, unmark
from manifold_tying.parametrizations._project import warn_if_off

M = TypeVar("M", bound=nn.Module)


def orthogonal(module: M, name: str = "weight", *, map: OrthogonalMap = "polar", blocks: int | None = None) -> M:
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

    Raises:
        ValueError: unknown map; ``name`` and ``blocks`` as for :func:`stiefel`.
    """
    if map not in get_args(OrthogonalMap):
        raise ValueError(f"unknown map {map!r}; choose one of {', '.join(get_args(OrthogonalMap))}")
    layout = Layout.orthonormal(module, name, blocks)
    dtype = getattr(module, name).dtype
    if map == "polar" or map == "qr":
        return register(module, name, OrthonormalFactor(layout, dtype, map))
    base = torch.empty_like(layout.to_matrix(getattr(module, name).detach()))
    return register(module, name, CayleyFactor(layout, dtype, base, None if map == "cayley" else 2))


def spd(module: M, name: str, *, diagonal: Diagonal = "softplus", bounds: Bounds | None = None) -> M:
    """Make the square ``module.name`` symmetric positive definite, T = L Lᵀ. Any optimizer trains it.

    L is lower triangular; its diagonal is the softplus or exp of the stored one, clamped to ``bounds`` if given. The weight
    is projected to the nearest symmetric positive definite matrix. (PIT, equation 10.)

    T is definite up to rounding: in float32 an eigenvalue below 1e-7 of the largest may come out negative. A random weight
    starts close to that; start from a well-conditioned one, such as the identity, or use float64.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        diagonal: "softplus" or "exp": maps the stored diagonal to positive numbers.
        bounds: (low, high) for the diagonal of L. Minimize the loss: ``maximize=True`` cannot leave a bound.

    Raises:
        ValueError: the weight is not square or has no positive eigenvalue; ``name`` as for :func:`stiefel`.
    """
    constraint = CholeskySPD(diagonal, bounds)
    shape = Layout.of(module, name).shape
    if shape[-1] != shape[-2]:
        raise ValueError(f"expected {type(module).__name__}.{name} to be square for T = L Lᵀ, got {tuple(shape)}")
    constraint.dtype = getattr(module, name).dtype
    return register(module, name, constraint)


def materialize(module: M) -> M:
    """Remove all constraints from ``module`` and its submodules and return it; the weights keep their values.

    Constraints of this package, other parametrizations with an attribute ``manifold``, and geoopt.ManifoldParameters, which
    become plain parameters. Warns of points that are off their manifold, and if R and P of an equivalence are not orthogonal
    to within 1e-3.
    """
    distributed.reshard_fsdp(module)
    warn_if_off(module)
    found = list(constraints(module))
    for path, owner, name in found:
        parts = parametrized(owner)[name]
        if not all(isinstance(part, Constraint) for part in parts):
            raise ValueError(f"{path} has other parametrizations over ours; remove those first")
        if distributed.is_dtensor(parts.original):
            raise ValueError(
                f"{path} is a DTensor; gather the state dict into an unsharded model first, then materialize that"
            )
    watched = [
        (path, part, parametrized(owner)[name].original)
        for path, owner, name in found
        for part in parametrized(owner)[name]
    ]
    for kind in {type(part) for _, part, _ in watched}:
        cast(type[Constraint], kind).warn_on_drift([one for one in watched if type(one[1]) is kind])
    with torch.inference_mode(False), torch.no_grad():
        for _, owner, name in found:
            value = getattr(owner, name)
            own_class(owner)
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            _replace_stored(getattr(owner, name), value.clone(memory_format=torch.contiguous_format))
    _release_others(module)
    return module


def _release_others(module: nn.Module) -> None:
    """Turn points that are not ours into plain parameters: under other parametrizations, and geoopt.ManifoldParameters."""
    for owner in module.modules():
        if parametrize.is_parametrized(owner):
            for name in [name for name, parts in parametrized(owner).items() if manifold_in(parts) is not None]:
                unmark(parametrized(owner)[name].original)
                own_class(owner)
                parametrize.remove_parametrizations(owner, name)
        if not isinstance(owner, parametrize.ParametrizationList):
            for p in owner.parameters(recurse=False):
                if manifold_of(p) is not None:
                    unmark(p)
                    p.__class__ = nn.Parameter  # the same object, which an optimizer may hold


def _replace_stored(weight: Tensor, value: Tensor) -> None:
    """Turn the stored tensor into the plain weight, even if its shape or dtype differs."""
    if weight.dtype == value.dtype:
        # set_ also updates the shape that autograd recorded, in case an older graph is still alive.
        weight.set_(value)  # type: ignore[call-overload]
    else:
        weight.data = value
    weight.grad = None  # belonged to the stored tensor
    unmark(weight)
    stamp(weight)


def own_class(module: nn.Module) -> None:
    """Give the module its own class: removing a parametrization changes the class, which copies of the module share."""
    kind = type(module)
    own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, own)


def constraints(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, tensor name) of each tensor in module that has a constraint of this package."""
    for prefix, owner in module.named_modules():
        if not isinstance(owner, parametrize.ParametrizationList) and parametrize.is_parametrized(owner):
            for name, parts in parametrized(owner).items():
                if any(isinstance(part, Constraint) for part in parts):
                    yield (f"{prefix}.{name}" if prefix else name), owner, name


def parametrized(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    """``module.parametrizations`` as a dict."""
    lists = cast(nn.ModuleDict, module.parametrizations)
    return {name: cast(parametrize.ParametrizationList, parts) for name, parts in lists.items()}


def is_ours(module: nn.Module) -> bool:
    """Whether the class comes from this package, such as a token interface, which resets its own tensors."""
    return any(kind.__module__.startswith("manifold_tying.") for kind in type(module).__mro__)


def _refuse_pickle(module: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"a {type(module).__name__} under a constraint cannot be pickled, and neither can a model that contains it. Save "
        "model.state_dict() and load it into a model built and constrained the same way, or save plain weights: "
        "torch.save(manifold_tying.materialize(copy.deepcopy(model)), path)"
    )


def register(module: M, name: str, constraint: Constraint) -> M:
    """Put a constraint on a parameter that :meth:`Layout.of` accepted; the same parameter becomes the stored tensor."""
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
    setattr(type(module), name, _weight_of(name))
    type(module).__getstate__ = _refuse_pickle  # type: ignore[method-assign]  # torch made this class for the module
    parts = cast(Float32ParametrizationList, parametrized(module)[name])
    parts.__class__ = Float32ParametrizationList
    parts.label, parts.weight_shape = label, weight_shape
    constraint.record_form(weight.device)
    set_owner(parts, module, name)
    mark(parts)
    stamp(weight)
    if "__setattr__" not in vars(type(module)):  # not yet patched by an earlier constraint
        _project_assigned_weights(type(module))
        if isinstance(module, nn.RNNBase):
            _keep_flat_weights(type(module))
    _explain_plain_weights(type(module))
    if hasattr(module, "reset_parameters") and not is_ours(module):
        _reset_plain_weights(type(module))
    weight.grad = None  # belonged to the plain weight
    return module


def _weight_of(name: str) -> property:
    """torch's property of a constrained weight, except that ``cached()`` tells apart layers of one class, such as copies."""

    def get(self: Any) -> Tensor:
        parts, key = self.parametrizations[name], (id(self), name)
        if not parametrize._cache_enabled:
            return cast(Tensor, parts() if torch.compiler.is_compiling() else _watched(parts))
        if key not in parametrize._cache:
            parametrize._cache[key] = parts()
        return cast(Tensor, parametrize._cache[key])

    def assign(self: Any, value: Tensor) -> None:
        parts = self.parametrizations[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor to assign to {parts.label}, got {type(value).__name__}")
        is_weight = isinstance(value, nn.Parameter) and manifold_of(value) is None  # and not another layer's point
        if is_weight and shared_parameters([value], more_than=0):
            raise ValueError(
                f"{parts.label} is constrained and cannot be tied to a parameter of another module. Assign a copy, which "
                "projects: layer.weight = other.weight.detach()"
            )
        parts.right_inverse(value.detach())
        parametrize._cache.pop((id(self), name), None)

    return property(get, assign)


_handed_out: WeakKeyDictionary[nn.Module, tuple[ref[Tensor], Tensor, int]] = WeakKeyDictionary()


def _watched(parts: Any) -> Tensor:
    """The weight; warns if the one computed before was written in place and dropped, which nn.init does in vain."""
    if (handed_out := _handed_out.pop(parts, None)) is not None:
        last, counter, version = handed_out
        if last() is None and counter._version != version:
            warnings.warn(
                f"{parts.label} was written in place, as torch.nn.init does, without effect: it is computed at each access. "
                "Assign it, which projects: layer.weight = torch.nn.init.normal_(torch.empty_like(layer.weight))",
                stacklevel=3,
            )
    weight: Tensor = parts()
    computed = type(weight) is Tensor and weight._base is not parts.original and not autograd.in_transform()
    if computed and autograd.has_data(weight) and not weight.is_inference():
        counter = weight.detach()
        counter.data = weight.new_empty(0)  # shares the version counter, not the memory
        _handed_out[parts] = ref(weight), counter, counter._version
    return weight


def _project_assigned_weights(kind: Any) -> None:
    """Make ``layer.weight = tensor`` project for an nn.Parameter, too, which nn.Module would register beside the constraint."""
    (layer,) = kind.__bases__

    def assign(self: Any, name: str, value: Any) -> None:
        constrained = isinstance(value, Tensor) and name in getattr(self, "parametrizations", {})
        if constrained and isinstance(self.parametrizations[name], Float32ParametrizationList):
            getattr(type(self), name).fset(self, value)
        else:
            layer.__setattr__(self, name, value)

    kind.__setattr__ = assign


def _explain_plain_weights(kind: Any) -> None:
    """Make loading a plain weight into a constrained one say what to do."""
    (layer,) = kind.__bases__

    def load(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        layer._load_from_state_dict(self, state, prefix, *rest)
        *_, errors = rest
        lists = parametrized(self) if parametrize.is_parametrized(self) else {}  # torch may have removed them
        for name in [name for name, parts in lists.items() if isinstance(parts, Float32ParametrizationList)]:
            if f"{prefix}{name}" in state and f"{prefix}parametrizations.{name}.original" not in state:
                errors.append(
                    f"{prefix}{name} is constrained here and plain in the state dict. Load it before adding the constraint, or "
                    f"assign it, which projects: module.{name} = state[{prefix + name!r}]"
                )

    kind._load_from_state_dict = load


def _reset_plain_weights(kind: Any) -> None:
    """Make ``reset_parameters`` draw plain weights, then assign them. It would otherwise write to a computed copy."""
    (layer,) = kind.__bases__

    def reset_parameters(self: Any, *args: Any, **options: Any) -> Any:
        with parametrize.cached():  # writes and reads then reach the same tensor
            for name, parts in parametrized(self).items():
                if isinstance(parts, Float32ParametrizationList) and len(parts) == 1:
                    # Not the map of the stored tensor, which may be uninitialized, or a shard.
                    dtype, device = cast(Constraint, parts[0]).dtype, parts.original.device
                    parametrize._cache[id(self), name] = torch.empty(parts.weight_shape, dtype=dtype, device=device)
            result = layer.reset_parameters(self, *args, **options)
            if isinstance(
                self, nn.RNNBase | nn.RNNCellBase
            ):  # it draws into its parameters, which are the stored tensors
                for name in parametrized(self):
                    nn.init.uniform_(getattr(self, name), -(self.hidden_size**-0.5), self.hidden_size**-0.5)
            drawn = {name: getattr(self, name).detach().clone() for name in self.parametrizations}
        for name, weight in drawn.items():
            setattr(self, name, weight)
        return result

    kind.reset_parameters = reset_parameters


def _keep_flat_weights(kind: Any) -> None:
    """Keep a recurrent layer's ``_flat_weights`` up to date, and out of copies.

    torch would put the assigned tensor there without projecting it. The computed weights carry a graph, so deepcopy fails.
    """
    copied, plain_assign = kind.__deepcopy__, kind.__setattr__

    def assign(self: Any, name: str, value: Any) -> None:
        plain_assign(self, name, value)
        if name in self._flat_weights_names:
            self._init_flat_weights()

    def copy(self: Any, memo: dict[int, Any]) -> Any:
        memo[id(self._flat_weights)] = [None] * len(self._flat_weights)  # refilled by the next forward
        return copied(self, memo)

    kind.__setattr__, kind.__deepcopy__ = assign, copy
