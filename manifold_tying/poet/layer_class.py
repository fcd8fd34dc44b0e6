"""One class for all linear layers with an equivalence, so that code compiled for one block of a model serves the others.

torch gives each parametrized module its own class. Dynamo guards on classes: it would recompile every block and give up at
the eighth. A layer leaves the shared class when torch is about to change the class for that layer alone.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from manifold_tying.parametrizations import own_class, parametrized

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def share_class(module: nn.Linear, forward: Callable[..., Tensor]) -> None:
    """Give a layer whose only parametrized tensor is the weight the class that all such layers share, with that forward."""
    changed: Any = module
    kind: Any = type(module)
    if set(parametrized(module)) != {"weight"}:
        kind.forward = forward  # this class belongs to the one layer
        return
    (layer,) = kind.__bases__
    if layer not in _classes:
        _classes[layer] = _shared_class(layer, kind, forward)
    changed.__class__ = _classes[layer]


class _SharedClass(type):
    def __delattr__(cls, name: str) -> None:
        # remove_parametrizations deletes the property, which other layers still need; `get` handles a plain weight.
        if name != "weight" or name not in vars(cls):
            super().__delattr__(name)


def _shared_class(layer: Any, kind: Any, forward: Callable[..., Tensor]) -> Any:
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
    own |= {"weight": property(get, weight.fset), "__delattr__": delete, "forward": forward}
    return _SharedClass(kind.__name__, kind.__bases__, own)
