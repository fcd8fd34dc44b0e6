"""What a constraint changes in the class of its layer: access, assignment, loading, resetting and pickling."""

import warnings
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manifold_tying import autograd, distributed
from manifold_tying.parametrizations._constraint import Constraint, Float32ParametrizationList
from manifold_tying.parametrizations._layout import shared_parameters
from manifold_tying.parametrizations._points import manifold_of


def adapt_class(module: nn.Module, name: str) -> None:
    """Adapt the class that torch made for the module to a new constraint on ``name``."""
    kind = type(module)
    setattr(kind, name, _weight_of(name))
    kind.__getstate__ = _refuse_pickle  # type: ignore[method-assign]  # torch made this class for the module
    if "__setattr__" not in vars(kind):  # not yet patched by an earlier constraint
        _project_assigned_weights(kind)
        if isinstance(module, nn.RNNBase):
            _keep_flat_weights(kind)
    _explain_plain_weights(kind)
    if hasattr(module, "reset_parameters") and not is_ours(module):
        _reset_plain_weights(kind)


def own_class(module: nn.Module) -> None:
    """Give the module its own class: removing a parametrization changes the class, which copies of the module share."""
    kind = type(module)
    own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    module.__class__ = type(kind.__name__, kind.__bases__, own)


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
        if value.shape != parts.weight_shape or not value.is_floating_point():
            got = f"{value.dtype} of shape {tuple(value.shape)}"
            raise ValueError(f"expected a floating tensor to assign to {parts.label}, got {got}")
        is_weight = isinstance(value, nn.Parameter) and manifold_of(value) is None  # and not another layer's point
        if is_weight and shared_parameters([value], more_than=0):
            raise ValueError(
                f"{parts.label} is constrained and cannot be tied to a parameter of another module. Assign a copy, which "
                "projects: layer.weight = other.weight.detach()"
            )
        parts.right_inverse(value.detach())
        parametrize._cache.pop((id(self), name), None)
        if is_weight and autograd.has_data(value):
            with torch.no_grad():
                moved = float((distributed.full_tensor(parts()) - value).norm() / value.norm())
            if moved > max(1e-3, 4 * torch.finfo(value.dtype).eps):
                warnings.warn(
                    f"{parts.label} is constrained: projecting the assigned nn.Parameter moved it by {moved:.1e} of its norm. "
                    "To fuse or merge into the weight, materialize first. A plain tensor is projected without this warning",
                    stacklevel=3,
                )

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
    is_view = any(weight._base is tensor for tensor in parts.stored)
    computed = type(weight) is Tensor and not is_view and not autograd.in_transform()
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
            own = f"{prefix}parametrizations.{name}."
            if f"{prefix}{name}" in state and not any(key.startswith(own) for key in state):
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
                    dtype, device = cast(Constraint, parts[0]).dtype, parts.stored[0].device
                    parametrize._cache[id(self), name] = torch.empty(parts.weight_shape, dtype=dtype, device=device)
            result = layer.reset_parameters(self, *args, **options)
            # A recurrent layer draws into its parameters, which are the stored tensors.
            if isinstance(self, nn.RNNBase | nn.RNNCellBase):
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


# One class for all linear layers whose constraint has a forward, so that code compiled for one block serves the others. torch
# gives each parametrized module its own class. Dynamo guards on classes: it would recompile every block and give up at the
# eighth. A layer leaves the shared class when torch is about to change the class for that layer alone.
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def share_class(module: nn.Linear) -> None:
    """Give a layer, whose constraint has a method ``linear``, a forward that calls it.

    If the weight is the layer's only parametrized tensor, all such layers share the class.
    """
    changed: Any = module
    kind: Any = type(module)
    if set(parametrized(module)) != {"weight"}:
        kind.forward = _linear_forward  # this class belongs to the one layer
        return
    (layer,) = kind.__bases__
    if layer not in _classes:
        _classes[layer] = _shared_class(layer, kind)
    changed.__class__ = _classes[layer]


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """The forward of the constraint; nn.Linear's own if the weight has other or further parametrizations."""
    lists = cast(Any, self).parametrizations
    parts: Any = lists["weight"] if "weight" in lists else []
    # accelerate brings offloaded tensors from the meta device where a module is called: the weight's own modules.
    if len(parts) == 1 and hasattr(parts[0], "linear") and not parts.stored[0].is_meta:
        return cast(Tensor, parts[0].linear(input, parts.stored, self.bias))
    return nn.Linear.forward(self, input)


class _SharedClass(type):
    def __delattr__(cls, name: str) -> None:
        # remove_parametrizations deletes the property, which other layers still need; `get` handles a plain weight.
        if name != "weight" or name not in vars(cls):
            super().__delattr__(name)


def _shared_class(layer: Any, kind: Any) -> Any:
    """A shared copy of the class that torch made for one module."""
    weight = kind.weight

    def get(self: Any) -> Any:
        if "weight" not in self.parametrizations:
            raise AttributeError("weight")  # nn.Module then looks it up in _parameters
        return weight.fget(self)

    def delete(self: Any, name: str) -> None:
        # register_parametrization deletes the tensor from the layer, then adds a property to its class.
        if isinstance(type(self), _SharedClass):
            own_class(self)
        layer.__delattr__(self, name)

    own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    own |= {"weight": property(get, weight.fset), "__delattr__": delete, "forward": _linear_forward}
    return _SharedClass(kind.__name__, kind.__bases__, own)
