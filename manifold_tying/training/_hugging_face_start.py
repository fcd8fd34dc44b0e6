"""A checkpoint with an arm's token interface, and how it is written at the end."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from manifold_tying.manifolds import Retraction, Stiefel
from manifold_tying.parametrizations import OnStiefel, mark_point, parametrized
from manifold_tying.tying import Memory
from manifold_tying.tying.huggingface import convert, halves, load, save
from manifold_tying.tying.huggingface._checkpoint import load_stock, write
from manifold_tying.tying.huggingface._folder import recorded_options
from manifold_tying.tying.huggingface._install import record
from manifold_tying.tying.huggingface._tables import read_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from manifold_tying.training.config import Settings
from manifold_tying.training.sections import Interface

MEMORIES: dict[str, Memory] = {"pit-frozen": "frozen", "pit-trainable": "trainable", "pit-free": "free"}


def start_model(settings: "Settings", interface: "Interface") -> "PreTrainedModel":
    """Load the checkpoint in float32 with the arm's token interface.

    "transpose" leaves it unchanged and "untied" copies its table to both sides. The PIT arms convert it, or keep the Z and T
    of a converted one.
    """
    assert settings.init_from is not None
    memory = MEMORIES.get(interface)
    if recorded_options(settings.init_from) is not None:
        converted = load(settings.init_from, dtype=torch.float32)
        return converted if memory == "free" else _with_memory(converted, memory == "trainable", settings.retraction)
    model = load_stock(settings.init_from, dtype=torch.float32)
    read_tables(model)  # refuses untied tables, for every arm
    if interface == "untied":
        _untie(model)
    elif memory is not None:
        convert(
            model,
            transform=settings.init_transform,
            bridge=settings.bridge,
            memory=memory,
            retraction=settings.retraction,
            diagonal=settings.diagonal,
        )
    return model


def _with_memory(model: "PreTrainedModel", trains: bool, retraction: Retraction | None) -> "PreTrainedModel":
    """Freeze or unfreeze the memory of a converted model, and record that."""
    stored = parametrized(halves(model)[0].interface)["memory"]
    point = stored[0]
    assert isinstance(point, OnStiefel) and retraction is not None, "the settings are resolved"
    point.manifold = Stiefel(retraction)
    mark_point(stored)
    stored.original.requires_grad_(trains)
    record(model)
    return model


def _untie(model: "PreTrainedModel") -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)


def write_model(model: "PreTrainedModel", folder: Path) -> None:
    """Write a trained arm: a converted checkpoint (manifold_tying.load) for PIT, a stock one for the others."""
    try:
        halves(model)
    except ValueError:
        write(model, folder)
    else:
        save(model, folder)
