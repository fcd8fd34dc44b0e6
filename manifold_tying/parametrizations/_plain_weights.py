"""Plain weights in the state dict of a transformers model, so that from_pretrained finds them in what the Trainer saves."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from manifold_tying import linalg
from manifold_tying.parametrizations._register import constraints, is_ours, parametrized


def keep_plain_weights(model: nn.Module) -> None:
    """Write every constrained weight beside what is stored for it into the state dict of a model with ``save_pretrained``.

    A stock model takes the plain weight, where it would draw one at random; a model with the constraints ignores it.
    ``equivalence_`` does this by itself; after constraints on single layers of a model of transformers call it once.
    """
    if hasattr(model, "save_pretrained") and _add not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_add)
        model.register_load_state_dict_pre_hook(_drop)


@torch.no_grad()
def _add(model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, stored, parts in _constrained(model):
        if f"{prefix}{stored}" in state:
            weight = linalg.whole(parts.original.detach())
            for part in parts:
                weight = part(weight)
            state[f"{prefix}{name}"] = weight.clone()  # safetensors refuses a tensor of two names


def _drop(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, stored, _parts in _constrained(model):
        if f"{prefix}{stored}" in state:
            state.pop(f"{prefix}{name}", None)


def _constrained(model: nn.Module) -> Iterator[tuple[str, str, ParametrizationList]]:
    """(name of the weight, name of what is stored, constraint) of the layers that a stock model has, too."""
    for name, owner, own in constraints(model):
        if not is_ours(owner):
            yield name, f"{name.removesuffix(own)}parametrizations.{own}.original", parametrized(owner)[own]
