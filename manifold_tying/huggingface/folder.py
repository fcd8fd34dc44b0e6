"""The folder of a checkpoint: its config entry, weight map, model class and table names; nothing is executed."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manifold_tying._extra import needs_extra
from manifold_tying._json import check_regular, read_object
from manifold_tying.huggingface._import import import_transformers
from manifold_tying.huggingface.native import MARK, check_mark

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


def recorded_mark(folder: Path) -> Mapping[str, Any] | None:
    """The validated mark of a converted checkpoint in config.json; None if the checkpoint is not converted."""
    entry = read_config(folder).get(MARK)
    try:
        return None if entry is None else check_mark(entry)
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
    where: Any = read_object(folder / INDEX, DAMAGED).get("weight_map")
    files = where.values() if isinstance(where, dict) else ()
    if not files or not all(isinstance(file, str) and re.fullmatch(r"[^/\\]*\.safetensors", file) for file in files):
        raise ValueError(f"{folder / INDEX} is damaged: expected a weight_map to safetensors files of this folder")
    return where


def read_shapes(files: Iterable[str | Path]) -> dict[str, list[int]]:
    """Map each tensor name in the safetensors files to its shape."""
    found: dict[str, list[int]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"expected weights in safetensors, got {file}")
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
    with needs_extra("train", "reading a saved model needs"):
        from safetensors import SafetensorError, safe_open
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


def table_names(folder: Path, where: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    """(embedding's name, head's name, whether a missing head is the embedding); ``where`` maps each tensor to its file.

    By what the model's class calls them.
    """
    model = build_empty(folder)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = _accessed(model, "input"), _accessed(model, "output")
    if id(embedding) not in names or id(head) not in names:
        raise ValueError(
            f"expected a language model in {folder}, but {type(model).__name__} has no embedding or no head "
            "(get_input_embeddings, get_output_embeddings)"
        )
    inside, outside = f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"
    pairs: Mapping[str, str] = model.all_tied_weights_keys
    source = pairs.get(inside, inside)
    tied = {source, *(target for target, of in pairs.items() if of == source)} - {inside}
    table, score = _stored(model, (inside, *sorted(tied)), where), _stored(model, (outside,), where)
    return table, None if score == table else score, outside in tied


def _accessed(model: Any, side: str) -> Any:
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def _stored(model: "PreTrainedModel", names: Sequence[str], where: Collection[str]) -> str | None:
    """The stored name of the parameter that the model calls ``names``, or None.

    Some classes rename parameters when they save. Checkpoints of base models lack a prefix; then the only stored name with the
    longest common suffix matches.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameter = torch.empty(1, 1, device="meta")
    saved = [name for own in names for name in revert_weight_conversion(model, {own: parameter})]
    if exact := [name for name in (*saved, *names) if name in where]:
        return exact[0]
    ends = {found: max(_common_end(name, found) for name in names) for found in where}
    longest = max(ends.values(), default=0)
    best = [found for found, length in ends.items() if length == longest]
    return best[0] if longest >= 2 and len(best) == 1 else None  # 1 part is only "weight"


def _common_end(left: str, right: str) -> int:
    pairs = zip(reversed(left.split(".")), reversed(right.split(".")), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(left.count("."), right.count(".")) + 1)
