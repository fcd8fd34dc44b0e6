"""The functions that put a constraint on a layer, and the one that takes them all off."""

from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import linalg
from manifold_tying.manifolds import Retraction, Stiefel
from manifold_tying.parametrizations._cholesky import Bounds, CholeskyFactor, CholeskySPD, Diagonal
from manifold_tying.parametrizations._constraint import Constraint, WideStorage, mark_point
from manifold_tying.parametrizations._layout import Layout
from manifold_tying.parametrizations._orthonormal import CayleyFactor, OnStiefel, OrthogonalMap, OrthonormalFactor
from manifold_tying.parametrizations._points import belongs, unmark

M = TypeVar("M", bound=nn.Module)


def stiefel(module: M, name: str = "weight", *, retraction: Retraction = "polar", blocks: int | None = None) -> M:
    """Keep ``module.name`` on the Stiefel manifold: the stored tensor is the point, a Riemannian optimizer moves it.

    The weight becomes the nearest one with orthonormal columns (rows, where it is wide) and costs nothing per forward.
    Train it with :mod:`manifold_tying.optim`: ``RiemannianAdam(model.parameters())`` or ``param_groups(model)``. Any other
    optimizer, geoopt's included, leaves the manifold and gets a warning at its first step.

    Works on Linear, Embedding, convolutions (flattened to a matrix from their second dimension on), MultiheadAttention's
    ``in_proj_weight``, recurrent layers and stacks of matrices (leading dimensions are batch dimensions). Under a bfloat16
    layer the point is stored in float32 and cast when used.

    ``reset_parameters`` of the layer projects what it draws. What writes to the weight in place, such as nn.init, does not:
    a Riemannian optimizer puts such a point back onto the manifold at its next step.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        retraction: how the optimizer moves the point, see :class:`manifold_tying.Stiefel`.
        blocks: how many matrices the weight stacks along its rows, each to be constrained on its own: 4 for an LSTM's weights,
            3 for a GRU's and for MultiheadAttention's ``in_proj_weight``. By default the weight is one matrix, and none of
            those in it is orthonormal, which warns.

    Raises:
        ValueError: an unknown retraction; blocks that do not divide the rows; ``name`` is no parameter of the module's own,
            is shared with another module, constrained already, or not a finite floating tensor of two or more dimensions.

    >>> layer = stiefel(nn.Linear(16, 64))
    >>> torch.allclose(layer.weight.T @ layer.weight, torch.eye(16), atol=1e-5)
    True
    """
    layout = Layout.orthonormal(module, name, blocks)
    return register(module, name, OnStiefel(layout, getattr(module, name).dtype, Stiefel(retraction)))


def orthogonal(module: M, name: str = "weight", *, map: OrthogonalMap = "polar", blocks: int | None = None) -> M:
    """Make ``module.name`` orthonormal as the image of a free tensor: any optimizer trains it.

    The weight becomes the nearest one with orthonormal columns (rows, where it is wide); assigning to it projects. Shapes
    as in :func:`stiefel`. The map runs at every access of the weight; wrap several in
    ``torch.nn.utils.parametrize.cached()``.

    Args:
        module: the layer, changed in place and returned.
        name: its parameter.
        map: "polar" (nearest orthonormal matrix), "qr", "cayley" (around a base point) or "cayley-neumann" (the same
            with two terms of a Neumann series in place of the inverse, then the polar factor: on a CPU it takes 2.3 to 3
            times as long as "cayley" on squares of 512 to 2048). All but "cayley" choose an algorithm by the values, so at
            each access the host waits for a GPU. Prefer "cayley" where that matters.
        blocks: how many matrices the weight stacks along its rows, as for :func:`stiefel`.

    Raises:
        ValueError: an unknown map; ``name`` and ``blocks`` as for :func:`stiefel`.
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
    """Make the square ``module.name`` symmetric positive definite, T = L Lᵀ, with any optimizer.

    L is lower triangular, its diagonal a softplus or exp of the stored one, clamped to ``bounds`` where given. The weight
    becomes the nearest symmetric positive definite one; ValueError where it has no positive eigenvalue. (PIT, equation 10.)
    """
    factor = CholeskyFactor(diagonal, bounds)
    shape = Layout.of(module, name).shape
    if shape[-1] != shape[-2]:
        raise ValueError(f"expected {type(module).__name__}.{name} to be square for T = L Lᵀ, got {tuple(shape)}")
    return register(module, name, CholeskySPD(factor, getattr(module, name).dtype))


def materialize(module: M) -> M:
    """Drop every constraint of ours on ``module`` and below, leaving plain weights with the same values; returns it.

    Warns where an equivalence's R and P were not orthogonal to 1e-3 any more.
    """
    linalg.reshard_fsdp(module)
    found = list(constraints(module))
    for path, owner, name in found:
        parts = parametrized(owner)[name]
        if not all(isinstance(part, Constraint) for part in parts):
            raise ValueError(f"{path} has other parametrizations over ours; remove those first")
        if linalg.is_dtensor(parts.original):
            raise ValueError(
                f"{path} is distributed over processes; gather the model's state into one that is not, first"
            )
    watched = [
        (path, part, parametrized(owner)[name].original)
        for path, owner, name in found
        for part in parametrized(owner)[name]
    ]
    for kind in {type(part) for _, part, _ in watched}:
        cast(type[Constraint], kind).watch_all([one for one in watched if type(one[1]) is kind])
    with torch.inference_mode(False), torch.no_grad():
        for _, owner, name in found:
            value = getattr(owner, name)
            _own_class(owner)
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            _become(getattr(owner, name), value.clone(memory_format=torch.contiguous_format))
    return module


def _become(weight: Tensor, value: Tensor) -> None:
    """The parameter that was the stored tensor is the plain weight, whatever shape and dtype it had."""
    if weight.dtype == value.dtype:
        weight.set_(value)  # type: ignore[call-overload]  # with what autograd knows of its shape, where a graph of before is still alive
    else:
        weight.data = value
    weight.grad = None  # that was the stored tensor's
    unmark(weight)


def _own_class(module: nn.Module) -> None:
    """Give a parametrized module a class that no copy of it shares, since removing a parametrization changes the class."""
    kind = type(module)
    own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, own)


def constraints(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, owner, tensor name) of each tensor at or below module under a constraint of ours."""
    for prefix, owner in module.named_modules():
        if not isinstance(owner, parametrize.ParametrizationList) and parametrize.is_parametrized(owner):
            for name, parts in parametrized(owner).items():
                if any(isinstance(part, Constraint) for part in parts):
                    yield (f"{prefix}.{name}" if prefix else name), owner, name


def parametrized(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    """``module.parametrizations`` as the dict that it is."""
    lists = cast(nn.ModuleDict, module.parametrizations)
    return {name: cast(parametrize.ParametrizationList, parts) for name, parts in lists.items()}


def is_ours(module: nn.Module) -> bool:
    """Whether the class is this package's own, such as a token interface's, which looks after its tensors itself."""
    return any(kind.__module__.startswith("manifold_tying.") for kind in type(module).__mro__)


def _refuse_pickle(module: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"a {type(module).__name__} under a constraint cannot be pickled, and neither can a model that contains it. Save "
        "model.state_dict() and load it into a model that was built and constrained in the same way, or save plain weights: "
        "torch.save(manifold_tying.materialize(copy.deepcopy(model)), path)"
    )


def register(module: M, name: str, constraint: Constraint) -> M:
    """Put a constraint on a parameter that :meth:`Layout.of` accepted; the parameter stays and becomes the stored tensor."""
    weight = getattr(module, name)
    label = f"{type(module).__name__}.{name} of shape {tuple(weight.shape)}"
    given = weight.data
    weight.data = given.to(linalg.compute_dtype(given.dtype))
    try:
        # unsafe: the stored tensor may have another shape (tall) and dtype (float32) than the weight.
        parametrize.register_parametrization(module, name, constraint, unsafe=True)
    except BaseException:
        weight.data = given  # a weight that cannot be projected leaves the module as it was
        raise
    type(module).__getstate__ = _refuse_pickle  # type: ignore[method-assign]  # of the class that torch just made for it
    parts = cast(WideStorage, parametrized(module)[name])
    parts.__class__ = WideStorage
    parts.label = label
    belongs(parts, module, name)
    mark_point(parts)
    module.register_load_state_dict_pre_hook(_explain_plain_weights)
    if hasattr(module, "reset_parameters") and not is_ours(module):
        _project_what_is_reset(type(module))
    if isinstance(module, nn.RNNBase):
        _keep_flat_weights(type(module))
    weight.grad = None  # that was the plain weight's
    return module


def _explain_plain_weights(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    *_, errors = rest
    for name in parametrized(module):
        if f"{prefix}{name}" in state and f"{prefix}parametrizations.{name}.original" not in state:
            errors.append(
                f"{prefix}{name} is constrained here and plain in the state dict. Load it before the constraint, or assign it, "
                f"which projects: module.{name} = state[{prefix + name!r}]"
            )


def _project_what_is_reset(kind: Any) -> None:
    """Let ``reset_parameters`` draw the plain weight, where it would write to the stored tensor or to a copy."""
    (layer,) = kind.__bases__

    def reset_parameters(self: Any) -> None:
        with parametrize.cached():  # so that what is written to is what is read
            layer.reset_parameters(self)
            drawn = {name: getattr(self, name).detach().clone() for name in self.parametrizations}
        for name, weight in drawn.items():
            setattr(self, name, weight)

    kind.reset_parameters = reset_parameters


def _keep_flat_weights(kind: Any) -> None:
    """Keep torch's list of a parametrized recurrent layer's weights up to date, and out of copies.

    torch would put an assigned tensor into it as it is, not projected; and the weights in it carry a graph, which no copy may.
    """
    (layer,), copied = kind.__bases__, kind.__deepcopy__

    def assign(self: Any, name: str, value: Any) -> None:
        layer.__setattr__(self, name, value)
        if name in self._flat_weights_names:
            self._init_flat_weights()

    def copy(self: Any, memo: dict[int, Any]) -> Any:
        memo[id(self._flat_weights)] = [None] * len(self._flat_weights)  # filled by the next forward
        return copied(self, memo)

    if "__setattr__" not in vars(kind):  # the layer's first constraint
        kind.__setattr__, kind.__deepcopy__ = assign, copy
