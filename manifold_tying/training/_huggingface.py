"""manifold-tying convert | export: transformers checkpoints in local folders."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from manifold_tying.training._checkpoint import STATE, checkpoints
from manifold_tying.training._inspect import interface_summary
from manifold_tying.training._saving import export_model
from manifold_tying.training.rundir import METRICS
from manifold_tying.tying import convert, export, load, save
from manifold_tying.tying.huggingface._checkpoint import load_stock
from manifold_tying.tying.huggingface._files import NOTE, README, is_note, note_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5")
_WRITTEN = ("config.json", "generation_config.json")
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class ConvertConfig:
    """Replace the tied tables of a transformers checkpoint by a PIT interface."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a transformers checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write to; tokenizer files are copied."""
    transform: Literal["identity", "head", "embedding", "rotation"] = "head"
    """Initial T: the identity, or such that head or embedding are unchanged. rotation (Llama-like models) rotates the
    residual stream first and changes the function only as far as the final norm's gain is uneven."""
    bridge: bool = False
    """Preserve the function exactly by a d x d matrix on both sides. The model then no longer has W_out E = I."""
    memory: Literal["free", "frozen", "trainable"] = "free"
    """One free table for any optimizer, or separate Z and T with Z frozen or trained on its manifold."""
    source: Literal["input", "output"] | None = None
    """Which one of two untied tables to keep."""


@dataclass(frozen=True)
class ExportConfig:
    """Write a converted checkpoint as a stock, untied one that any program reads, or a run's weights as one file.

    A run is written as model.safetensors with the weights of its newest checkpoint.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder that convert wrote, a run's folder, or one of its checkpoints."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write to; tokenizer files are copied."""


def run_convert(config: ConvertConfig, console: Console) -> None:
    model = _read(config.model)
    _check_out(config.model, config.out)
    convert(model, transform=config.transform, bridge=config.bridge, memory=config.memory, source=config.source)
    save(model, config.out)
    _copy_rest(config.model, config.out)
    console.print(interface_summary(config.out))


def run_export(config: ExportConfig, console: Console) -> None:
    _check_out(config.model, config.out)
    if there := [name for name in ("config.json", "model.safetensors") if (config.out / name).exists()]:
        raise ValueError(
            f"{config.out} holds a model already ({', '.join(there)}); choose another folder, or delete it"
        )
    saved = [*checkpoints(config.model), *(config.model,) * (config.model / STATE).exists()]
    if saved:
        export_model(saved[-1], config.out)
        console.print(interface_summary(config.out))
        return
    export(load(config.model), config.out)
    _copy_rest(config.model, config.out)
    console.print(interface_summary(config.out))


def _read(path: Path) -> "PreTrainedModel":
    if any((path / name).is_file() for name in (METRICS, STATE)):
        raise ValueError(
            f"{path} is a run of train or ablate; convert is for transformers checkpoints, and export for runs"
        )
    return load_stock(path)


def _check_out(model: Path, out: Path) -> None:
    if out.resolve() == model.resolve():
        raise ValueError(f"expected another folder to write to than the model's own, got {out} twice")


def _copy_rest(model: Path, out: Path) -> None:
    """Copy tokenizer, chat templates, license: every file that is neither weights nor written by transformers.

    A README in OUT is kept, and so is the note on a converted checkpoint, under its second name.
    """
    noted = is_note(out / README)
    for file in model.iterdir():
        if not file.is_file() or file.name in _WRITTEN or any(file.match(pattern) for pattern in _WEIGHTS):
            continue
        if not is_note(file) and (file.name != README or noted or not (out / README).exists()):
            shutil.copy2(file, out / file.name)
    if noted and not is_note(out / README):
        (out / note_name(out)).write_text(NOTE, encoding="utf-8")
    if (model / _TEMPLATES).is_dir():
        shutil.copytree(model / _TEMPLATES, out / _TEMPLATES, dirs_exist_ok=True)
