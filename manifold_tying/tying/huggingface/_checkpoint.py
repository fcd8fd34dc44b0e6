"""Save and load converted models: transformers checkpoints with the interface instead of the tables."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manifold_tying._transformers import import_transformers
from manifold_tying.parametrizations import constraints
from manifold_tying.tying._free_pit import FreePIT
from manifold_tying.tying._pit import PIT
from manifold_tying.tying.huggingface._entry import METHOD
from manifold_tying.tying.huggingface._files import write as write
from manifold_tying.tying.huggingface._folder import (
    build_empty,
    model_class,
    read_config,
    read_shapes,
    recorded_options,
    weight_map,
)
from manifold_tying.tying.huggingface._install import halves, record
from manifold_tying.tying.huggingface._tables import check_adapters, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    """Load the model. ``spare`` skips modules that its class lacks, such as a pooler, with a warning."""
    build_empty(folder)  # fails early and names config.json; transformers would fail while reading the weights
    read_shapes(folder / file for file in dict.fromkeys(weight_map(folder).values()))
    # The report lists mismatched shapes. Without the option, transformers' error advises ignoring them.
    options = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    try:
        model, report = model_class(folder).from_pretrained(folder, output_loading_info=True, **options)
    except RuntimeError as error:
        raise ValueError(f"transformers cannot read the weights in {folder}: {error}") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    unexpected = wrong.get("unexpected_keys", [])
    if spare and unexpected and all(_is_spare(model, name) for name in unexpected):
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
