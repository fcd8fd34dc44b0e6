"""Plain weights in the state dict of a transformers model, so that from_pretrained finds them in what the Trainer saves."""

from typing import Any

import torch
from torch import nn

from manifold_tying import linalg
from manifold_tying.parametrizations._equivalence import equivalences


def keep_plain_weights(model: nn.Module) -> None:
    """Write W beside R, P and W0 into the state dict of a model that has ``save_pretrained``.

    A stock model takes the plain weight, where it would draw one at random; a model with the equivalences ignores it.
    """
    if hasattr(model, "save_pretrained") and _add not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_add)
        model.register_load_state_dict_pre_hook(_drop)


@torch.no_grad()
def _add(model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, part, stored in equivalences(model):
        if f"{prefix}{_stored_key(name)}" in state:
            state[f"{prefix}{name}"] = part(linalg.whole(stored.detach()))


def _drop(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, *_others in equivalences(model):
        if f"{prefix}{_stored_key(name)}" in state:
            state.pop(f"{prefix}{name}", None)


def _stored_key(name: str) -> str:
    """blocks.0.up.weight is stored as blocks.0.up.parametrizations.weight.original."""
    owner, dot, own = name.rpartition(".")
    return f"{owner}{dot}parametrizations.{own}.original"
