"""Converted models on disk: a transformers checkpoint with the interface in the place of the tables."""

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
    """Write a converted model: safetensors, config.json, generation_config.json; :func:`load` has back the same numbers.

    ``AutoModelForCausalLM.from_pretrained`` reads it wherever manifold_tying is imported, and refuses it elsewhere: under the
    name of the stock table there is an empty tensor. For other programs write a stock checkpoint by :func:`export`.
    ``model.save_pretrained``, as the Trainer calls it, writes the same.

    Args:
        model: converted by :func:`convert`.
        path: a folder, made where it is missing. Weights that are there already are replaced, once the new ones are complete.
    """
    check_model(model)
    check_adapters(model)
    embedding, _ = halves(model)
    ours = {id(part) for part in embedding.interface.modules()}
    if body := [name for name, owner, _ in constraints(model) if id(owner) not in ours]:
        raise ValueError(
            f"expected plain weights around the interface, but {', '.join(body)} are constrained, which a checkpoint of "
            "transformers cannot say; call manifold_tying.materialize on those layers first, or keep model.state_dict()"
        )
    check_memory(embedding.interface)
    record(model)  # anew: PEFT unties the config when it merges, and Z may have been frozen or released since
    write(model, Path(path))


def load(path: str | os.PathLike[str], **options: Any) -> "PreTrainedModel":
    """The model that :func:`save` wrote, bit for bit, in the class that it had.

    Args:
        path: its folder.
        options: of the class's ``from_pretrained``, for instance dtype=torch.bfloat16: Z and L stay float32 then.

    Raises:
        ValueError: no converted checkpoint, or one whose parts disagree: config.json, tensors and their shapes, ZᵀZ = I.
    """
    import_transformers()
    folder = Path(path)
    if recorded_options(folder) is None:
        raise ValueError(
            f"{folder / 'config.json'} is of no converted model: it has no entry of {METHOD!r}; load it with transformers and "
            "convert it"
        )
    return _read(folder, **options)


def load_stock(folder: Path, **options: Any) -> "PreTrainedModel":
    """A stock checkpoint in the class that its config.json names; no tensor of it is drawn at random.

    Args:
        folder: of the checkpoint.
        options: as for :func:`load`.

    Raises:
        ValueError: a converted or quantized checkpoint, pickled weights, or one whose parts disagree.
    """
    if recorded_options(folder) is not None:
        raise ValueError(f"{folder} is a converted checkpoint already; export it first to convert it in another way")
    if entry := read_config(folder).get("quantization_config"):
        raise ValueError(
            f"expected a checkpoint in floating point, but {folder / 'config.json'} says that it is quantized "
            f"({entry.get('quant_method')!r:.80}); convert the model that it was made from"
        )
    return _read(folder, spare=True, **options)


def _read(folder: Path, *, spare: bool = False, **options: Any) -> "PreTrainedModel":
    """The model; with ``spare``, modules that its class does not have, such as a pooler, are left out with a warning."""
    build_empty(folder)  # names config.json where transformers would fail in the middle of reading the weights
    read_shapes(folder / file for file in dict.fromkeys(weight_map(folder).values()))
    # Mismatched shapes are in the report, too. Without the option the error advises to ignore them.
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
            f"{type(model).__name__} has no place for {', '.join(unexpected)} of {folder}: left out", stacklevel=4
        )
    if wrong:
        raise ValueError(
            f"the parts of the checkpoint in {folder} disagree, and no tensor may be left out or drawn at random: {wrong}. "
            "Get the missing files, or load the model in Python and pass it to manifold_tying.convert"
        )
    return model


def _is_spare(model: "PreTrainedModel", name: str) -> bool:
    """Whether a tensor is of a module that the class does not have; one of a numbered layer or of a module there is missed."""
    owner = name.rpartition(".")[0]
    return owner not in dict(model.named_modules()) and not any(part.isdigit() for part in name.split("."))


@torch.no_grad()
def check_memory(interface: PIT) -> None:
    """ValueError unless every number is finite and ZᵀZ is about I, tried on a few vectors; a free table has full rank."""
    if any(tensor.is_meta for tensor in interface.parameters()):
        return  # offloaded: not in memory now
    if broken := [name for name, tensor in interface.named_parameters() if not torch.isfinite(tensor).all()]:
        raise ValueError(
            f"expected finite numbers in the interface, got NaN or Inf in {', '.join(broken)}: the weights are damaged"
        )
    if isinstance(interface, FreePIT):
        interface.embed(torch.zeros(1, dtype=torch.int64, device=interface.table.device))
        return
    Z = interface.memory
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(Z.shape[1], 4, generator=generator).to(Z)
    error = (Z.mT @ (Z @ probe) - probe).norm() / probe.norm()
    if not error <= LARGEST_DEFECT:
        raise ValueError(
            f"expected a memory with ZᵀZ = I, got ‖ZᵀZx - x‖ / ‖x‖ = {error:.1e}: the weights are "
            "damaged, or an optimizer that leaves the manifold has trained them (take manifold_tying.optim, with "
            "param_groups(model)). The nearest such memory: interface.memory = interface.memory"
        )
