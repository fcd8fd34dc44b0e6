"""Read a transformers checkpoint folder: config.json, and safetensors in one file or in shards with an index.

Every command reads folders through this module. It validates each value before use, and never unpickles or executes anything.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manifold_tying._json import check_regular, read_object
from manifold_tying._transformers import import_transformers
from manifold_tying.tying.huggingface._entry import METHOD, check_entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGED = "it is damaged or incomplete"


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"expected the folder of a transformers checkpoint, but {folder / 'config.json'} does not exist"
        )
    return read_object(folder / "config.json", DAMAGED)


def recorded_options(folder: Path) -> dict[str, Any] | None:
    """The validated entry of a converted checkpoint in config.json; None if the checkpoint is not converted."""
    entry = read_config(folder).get("quantization_config")
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise ValueError(
            f"{folder / 'config.json'} is damaged: expected a JSON object as quantization_config, got {entry!r:.80}"
        )
    if entry.get("quant_method") != METHOD:
        return None
    try:
        return check_entry(entry)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def weight_map(folder: Path) -> dict[str, str]:
    """Map each tensor name to its file; ValueError if an index points outside the folder."""
    if (folder / WHOLE).exists():
        with _open(folder / WHOLE) as tensors:
            return dict.fromkeys(tensors.keys(), WHOLE)
    if not (folder / INDEX).exists():
        raise ValueError(
            f"expected weights as safetensors, but {folder} has neither {WHOLE} nor {INDEX}. Load pickled weights (.bin) "
            "with transformers, if you trust them, and save the model again with safe_serialization=True"
        )
    where = read_object(folder / INDEX, DAMAGED).get("weight_map")
    if not isinstance(where, dict) or not where or not all(map(_is_safetensors_here, where.values())):
        raise ValueError(
            f"{folder / INDEX} is damaged: expected a weight_map from parameters to safetensors files of this folder"
        )
    return where


def _is_safetensors_here(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not {"/", "\\"} & {*name}


def read_shapes(files: Iterable[str | Path]) -> dict[str, list[int]]:
    """Map each tensor name in the safetensors files to its shape."""
    found: dict[str, list[int]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"expected a converted checkpoint in safetensors, got {file}")
        with _open(file) as tensors:
            found |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    return found


def read_tensors(folder: Path, where: Mapping[str, str], names: Iterable[str]) -> dict[str, Tensor]:
    """Read only the named tensors."""
    read = {}
    for name in names:
        with _open(folder / where[name]) as tensors:
            if name not in tensors.keys():
                raise ValueError(f"{folder / where[name]} lacks {name}, which the index names; download it again")
            read[name] = tensors.get_tensor(name)
    return read


def _open(file: str | Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "reading a saved model needs safetensors; install the extra: pip install 'manifold-tying[train]' "
            "(from a checkout: pip install '.[train]')"
        ) from error
    try:
        check_regular(file)
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}): it is missing, damaged or incomplete") from error


def model_class(folder: Path) -> Any:
    """The class named under ``architectures`` in config.json: from transformers or registered with AutoModelForCausalLM."""
    transformers = import_transformers()
    file = folder / "config.json"
    names = read_config(folder).get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(
            f'expected {file} to name the model\'s class, as in "architectures": ["LlamaForCausalLM"], got {names!r:.80}'
        )
    kind = getattr(transformers, names[0], None)
    if kind is None:
        registered = transformers.AutoModelForCausalLM._model_mapping.get(type(read_transformers_config(folder)), None)
        kind = registered if getattr(registered, "__name__", None) == names[0] else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"{file} names {names[0]!r} under architectures, which is not a model class of transformers "
            f"{transformers.__version__}. Fix the entry, install a version that has the class, or register your own class with "
            "AutoModelForCausalLM.register"
        )
    return kind


def read_transformers_config(folder: Path) -> Any:
    """config.json as transformers' configuration object."""
    read_config(folder)
    try:
        return import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged fields can make a config class raise any exception
        raise ValueError(f"transformers does not know the model in {folder / 'config.json'}: {error}") from error


def build_empty(folder: Path) -> "PreTrainedModel":
    """Build the stock model from config.json on the meta device."""
    kind, config = model_class(folder), read_transformers_config(folder)
    try:
        with torch.device("meta"):
            return kind(config)
    except Exception as error:
        raise ValueError(
            f"transformers cannot build a {kind.__name__} from {folder / 'config.json'}: {type(error).__name__}: {error}"
        ) from error
