"""One class for all linear layers whose constraint has a forward, so that code compiled for one block serves the others.

torch gives each parametrized module its own class. Dynamo guards on classes: it would recompile every block and give up at
the eighth. A layer leaves the shared class when torch is about to change the class for that layer alone.
"""

from typing import Any, cast

from torch import Tensor, nn

from manifold_tying.parametrizations._layer_class import own_class, parametrized

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
