"""The model of a checkpoint with an arm's token interface, and what is written of it at the end."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from manifold_tying.tying import Memory
from manifold_tying.tying.huggingface import convert, halves, save
from manifold_tying.tying.huggingface._checkpoint import write
from manifold_tying.tying.huggingface._register import import_transformers
from manifold_tying.tying.huggingface._tables import read_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from manifold_tying.training._config import Interface, Settings


def start_model(settings: "Settings", interface: "Interface") -> "PreTrainedModel":
    """The checkpoint in float32 with the arm's token interface.

    "transpose" is the checkpoint as it is, "untied" has its table on both sides, the PIT arms are converted.
    """
    assert settings.init_from is not None
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings.init_from, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )
    read_tables(model)  # refuses what is untied or converted already, whatever the arm
    if interface == "untied":
        _untie(model)
    elif interface != "transpose":
        memory: Memory = "frozen" if interface == "pit-frozen" else "trainable"
        convert(
            model,
            transform=settings.init_transform,
            bridge=settings.bridge,
            memory=memory,
            retraction=settings.retraction,
            diagonal=settings.diagonal,
        )
    return model


def _untie(model: "PreTrainedModel") -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)


def write_model(model: "PreTrainedModel", folder: Path) -> None:
    """A checkpoint of a trained arm: converted (manifold_tying.load) for PIT, stock for the others."""
    try:
        halves(model)
    except ValueError:
        write(model, folder)
    else:
        save(model, folder)
