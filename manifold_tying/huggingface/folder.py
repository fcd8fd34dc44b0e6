"""The folder of a transformers checkpoint: its config and its model's class; nothing in it is executed."""

from pathlib import Path
from typing import Any

from manifold_tying._json import read_object
from manifold_tying._safetensors import DAMAGED
from manifold_tying.huggingface.native import MARK, check_mark, import_transformers


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"expected the folder of a transformers checkpoint, but {file} does not exist")
    return read_object(file, DAMAGED)


def recorded_mark(folder: Path) -> Any:
    """The validated mark of a converted checkpoint in config.json; None if the checkpoint is not converted."""
    if (entry := read_config(folder).get(MARK)) is not None:
        check_mark(entry, folder / "config.json")
    return entry


def model_class(config: Any, file: Path) -> Any:
    """The class that a config, read from a file, names: from transformers or registered with AutoModelForCausalLM."""
    transformers, names = import_transformers(), config.architectures
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(
            f'expected {file} to name the model\'s class, as in "architectures": ["LlamaForCausalLM"], got {names!r:.80}'
        )
    kind = getattr(transformers, names[0], None)
    if kind is None:
        registered = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
        kind = registered if getattr(registered, "__name__", None) == names[0] else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"{file} names {names[0]!r} under architectures, which is not a model class of transformers "
            f"{transformers.__version__}. Fix the entry, install a version that has the class, or register your own class with "
            "AutoModelForCausalLM.register"
        )
    return kind


def read_transformers_config(folder: Path) -> Any:
    """config.json, which :func:`recorded_mark` has read, as transformers' configuration object."""
    try:
        return import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged fields can make a config class raise any exception
        raise ValueError(f"transformers does not know the model in {folder / 'config.json'}: {error}") from error
