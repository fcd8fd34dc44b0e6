"""Export a converted model as a stock, untied transformers checkpoint."""

import copy
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manifold_tying.parametrizations import constraints
from manifold_tying.tying.huggingface._files import write
from manifold_tying.tying.huggingface._install import halves
from manifold_tying.tying.huggingface._tables import check_adapters, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ASSUME_TYING = ("gemma", "cohere")
"""Model families whose serving converters assume tied tables."""


@torch.no_grad()
def export(model: "PreTrainedModel", path: str | os.PathLike[str]) -> None:
    """Write an untied checkpoint that plain transformers loads, with dense tables E and W_outᵀ and the same logits.

    E = Z T⁻¹ and W_out = T Zᵀ (with a bridge B: E B and B W_out) are computed in float64 and cast once, to the model's dtype.
    Constrained weights of the body become plain weights. The checkpoint has V d more parameters than the converted model.

    Args:
        model: a model converted by :func:`convert`; not changed.
        path: output folder, created if missing.
    """
    check_model(model)
    check_adapters(model)
    halves(model)
    if away := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise ValueError(
            f"expected the model in memory, but {', '.join(away)} are offloaded or on the meta device; load the model "
            "without a device map"
        )
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.__dict__.pop("requires", None)
    _parse_dtypes(config)
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):
        stock = type(model)(config)
    stock.load_state_dict(_plain_state(model, stock.state_dict().keys()), assign=True)
    if (generation := getattr(model, "generation_config", None)) is not None:
        stock.generation_config = generation
    if any(family in config.model_type for family in ASSUME_TYING):
        warnings.warn(
            f"{config.model_type}: programs that serve this family (llama.cpp, vLLM) assume tied tables, and drop the head or "
            "fail. transformers reads the checkpoint correctly. Compare logits before serving it elsewhere",
            stacklevel=2,
        )
    write(stock, Path(path))


def _parse_dtypes(config: "PreTrainedConfig") -> None:
    """Convert the config's dtype names to torch dtypes: ``save_pretrained`` leaves names, and Apertus passes them to torch."""
    if isinstance(dtype := getattr(config, "dtype", None), str):
        config.dtype = getattr(torch, dtype)
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _parse_dtypes(part)


def _plain_state(model: "PreTrainedModel", names_of_stock: Collection[str]) -> dict[str, torch.Tensor]:
    """State dict of the equivalent stock model. Keeps the stock model's own parametrizations, such as weight norm."""
    embedding, head = halves(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside, outside = names[id(embedding)], names[id(head)]
    replaced = (f"{inside}.interface.", f"{outside}.interface.")
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(replaced) and (".parametrizations." not in name or name in names_of_stock)
    }
    for name, owner, attribute in constraints(model):
        if not name.startswith(replaced):
            state[name] = getattr(owner, attribute).detach()
    E, W_out = embedding.interface.materialize(embedding.weight.dtype)
    state |= {f"{inside}.weight": E, f"{outside}.weight": W_out.T.contiguous()}
    # safetensors rejects tensors that share memory, such as BERT's bias; an untied model stores each separately.
    once: set[int] = set()
    for name, tensor in state.items():
        state[name] = tensor.clone() if tensor.data_ptr() in once else tensor
        once.add(tensor.data_ptr())
    return state
