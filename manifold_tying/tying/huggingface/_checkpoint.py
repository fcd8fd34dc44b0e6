"""Converted models on disk: a transformers checkpoint with the interface in the place of the tables."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manifold_tying._json import parsed, read_bytes
from manifold_tying.parametrizations import constraints
from manifold_tying.tying._pit import PIT
from manifold_tying.tying.huggingface._files import write as write
from manifold_tying.tying.huggingface._install import METHOD, halves, record
from manifold_tying.tying.huggingface._register import import_transformers, register
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
    transformers = import_transformers()
    register()
    config = Path(path, "config.json")
    if not config.is_file():
        raise ValueError(f"expected the folder of a converted model, but there is no {config}")
    if recorded_options(Path(path)) is None:
        raise ValueError(
            f"{config} is of no converted model: it has no entry of {METHOD!r}; load it with transformers and convert it"
        )
    written = (read_config(Path(path)).get("architectures") or [""])[0]
    kind: Any = getattr(transformers, written, transformers.AutoModelForCausalLM)
    model, report = kind.from_pretrained(path, local_files_only=True, output_loading_info=True, **options)
    if wrong := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise ValueError(f"the parts of the checkpoint in {path} disagree: {wrong}")
    return model


def recorded_options(folder: Path) -> dict[str, Any] | None:
    """What config.json says of a converted checkpoint's interface; None where it says nothing, as of a stock one."""
    entry = read_config(folder).get("quantization_config") or {}
    return entry if entry.get("quant_method") == METHOD else None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; ValueError that names it where it is no JSON object."""
    file = folder / "config.json"
    try:
        config = parsed(read_bytes(file).decode())
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, but {error}; it is damaged, or not all of it was copied") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"expected a JSON object in {file}, got a {type(config).__name__}; it is no model's config.json"
        )
    return config


@torch.no_grad()
def check_memory(interface: PIT) -> None:
    """ValueError unless ZᵀZ is about I, tried on a few vectors, and L is finite."""
    if any(tensor.is_meta for tensor in interface.parameters()):
        return  # offloaded: not in memory now
    Z, L = interface.memory, interface.cholesky_factor
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(Z.shape[1], 4, generator=generator).to(Z)
    error = (Z.mT @ (Z @ probe) - probe).norm() / probe.norm()
    if not error <= LARGEST_DEFECT or not torch.isfinite(L).all():
        raise ValueError(
            f"expected a memory with ZᵀZ = I and a finite Cholesky factor, got ‖ZᵀZx - x‖ / ‖x‖ = {error:.1e}: the weights are "
            "damaged, or an optimizer that leaves the manifold has trained them (take manifold_tying.optim, with "
            "param_groups(model)). The nearest such memory: interface.memory = interface.memory"
        )
