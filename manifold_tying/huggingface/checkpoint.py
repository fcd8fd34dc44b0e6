"""Save, load and export converted models."""

import copy
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manifold_tying._transformers import import_transformers
from manifold_tying.huggingface.files import write as write
from manifold_tying.huggingface.folder import (
    METHOD,
    build_empty,
    model_class,
    read_config,
    read_shapes,
    read_tensors,
    recorded_options,
    weight_map,
)
from manifold_tying.huggingface.install import half_names, halves, record, rename
from manifold_tying.huggingface.tables import check_adapters, check_model
from manifold_tying.parametrizations import constraints
from manifold_tying.tying import PIT, FreePIT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LARGEST_DEFECT = 1e-3


def save(model: "PreTrainedModel", path: str | os.PathLike[str]) -> None:
    """Write a converted model: safetensors, config.json, generation_config.json. :func:`load` restores it bit for bit.

    ``AutoModelForCausalLM.from_pretrained`` reads it if manifold_tying is imported. Otherwise loading fails, because the stock
    table is stored as an empty tensor. For other programs write a stock checkpoint with :func:`export`.
    ``model.save_pretrained``, which the Trainer calls, writes the same files.

    Args:
        model: a model converted by :func:`convert`.
        path: output folder, created if missing. Existing weights are replaced once the new ones are complete.
    """
    check_model(model)
    check_adapters(model)
    embedding, _ = halves(model)
    ours = {id(part) for part in embedding.interface.modules()}
    if body := [name for name, owner, _ in constraints(model) if id(owner) not in ours]:
        raise ValueError(
            f"expected plain weights outside the interface, but {', '.join(body)} are constrained. A transformers checkpoint "
            "cannot store constraints: call manifold_tying.materialize on those layers, or save model.state_dict() instead"
        )
    check_memory(embedding.interface)
    record(model)  # again: PEFT unties the config when it merges, and Z may have been frozen or unfrozen
    write(model, Path(path))
    rename(model, os.fspath(path))


def load(path: str | os.PathLike[str], **options: Any) -> "PreTrainedModel":
    """Load a model that :func:`save` wrote, bit for bit and in its original class.

    Args:
        path: folder of the checkpoint.
        options: passed to the class's ``from_pretrained``. With dtype=torch.bfloat16, Z and L stay float32.

    Raises:
        ValueError: not a converted checkpoint, or config.json, the tensors and their shapes disagree, or ZᵀZ ≠ I.
    """
    import_transformers()
    folder = Path(path)
    if recorded_options(folder) is None:
        raise ValueError(
            f"{folder} is not a converted model: its config.json has no entry of {METHOD!r}. Load it with transformers, then "
            "convert it"
        )
    return _read(folder, **options)


def load_stock(folder: Path, **options: Any) -> "PreTrainedModel":
    """Load a stock checkpoint in the class that its config.json names; no tensor is randomly initialized.

    Args:
        folder: folder of the checkpoint.
        options: as for :func:`load`.

    Raises:
        ValueError: the checkpoint is converted, quantized or pickled, or its parts disagree.
    """
    if recorded_options(folder) is not None:
        raise ValueError(f"{folder} is already converted; export it first to convert it with other options")
    if entry := read_config(folder).get("quantization_config"):
        raise ValueError(
            f"expected a floating-point checkpoint, but according to {folder / 'config.json'} it is quantized "
            f"({entry.get('quant_method')!r:.80}); convert the unquantized model"
        )
    return _read(folder, spare=True, **options)


def _read(folder: Path, *, spare: bool = False, **options: Any) -> "PreTrainedModel":
    """Load the model. ``spare`` skips masks and modules that its class lacks, such as a pooler, with a warning."""
    build_empty(folder)  # fails early and names config.json; transformers would fail while reading the weights
    where = weight_map(folder)
    read_shapes(folder / file for file in dict.fromkeys(where.values()))
    # The report lists mismatched shapes. Without the option, transformers' error advises ignoring them.
    options = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    try:
        model, report = model_class(folder).from_pretrained(folder, output_loading_info=True, **options)
    except RuntimeError as error:
        raise ValueError(f"transformers cannot read the weights in {folder}: {error}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    unexpected = wrong.get("unexpected_keys", [])
    if spare and unexpected and all(_is_spare(model, name) or _is_mask(folder, where, name) for name in unexpected):
        del wrong["unexpected_keys"]
        warnings.warn(
            f"{type(model).__name__} has no place for {', '.join(unexpected)} of {folder}: skipped", stacklevel=4
        )
    if wrong:
        raise ValueError(
            f"the parts of the checkpoint in {folder} disagree: {wrong}. No tensor may be skipped or randomly initialized. "
            "Get the missing files, or load the model in Python and pass it to manifold_tying.convert"
        )
    return model


def _is_spare(model: "PreTrainedModel", name: str) -> bool:
    """Whether the tensor's module is absent from the class and is not part of a numbered layer, so it can be skipped."""
    owner = name.rpartition(".")[0]
    return owner not in dict(model.named_modules()) and not any(part.isdigit() for part in name.split("."))


def _is_mask(folder: Path, where: Mapping[str, str], name: str) -> bool:
    """Whether the stored tensor is an attention mask or a constant, which early versions of transformers saved."""
    stored = [own for own in where if name.endswith(own)][:1]  # checkpoints of base models lack a prefix
    return any(not t.is_floating_point() or t.ndim == 0 for t in read_tensors(folder, where, stored).values())


@torch.no_grad()
def check_memory(interface: PIT) -> None:
    """ValueError unless all entries are finite and ZᵀZ ≈ I on a few random vectors, or a free table has full rank."""
    if any(tensor.is_meta for tensor in interface.parameters()):
        return  # offloaded
    if broken := [name for name, tensor in interface.named_parameters() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"expected a finite interface, got NaN or Inf in {', '.join(broken)}: the weights are damaged")
    if isinstance(interface, FreePIT):
        interface.embed(torch.zeros(1, dtype=torch.int64, device=interface.table.device))
        return
    Z = interface.memory
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(Z.shape[1], 4, generator=generator).to(Z)
    error = (Z.mT @ (Z @ probe) - probe).norm() / probe.norm()
    if not error <= LARGEST_DEFECT:
        raise ValueError(
            f"expected a memory with ZᵀZ = I, got ‖ZᵀZx - x‖ / ‖x‖ = {error:.1e}: the weights are damaged, or an optimizer "
            "that leaves the manifold trained them. Train with manifold_tying.optim and param_groups(model); to project Z "
            "back, assign interface.memory = interface.memory"
        )


ASSUME_TYING = ("gemma", "cohere")  # model families whose serving converters assume tied tables


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
    embedding, _ = halves(model)
    inside, outside = half_names(model)
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
