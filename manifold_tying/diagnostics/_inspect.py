"""The two tables of a saved model, read from safetensors alone: nothing of a checkpoint is executed or unpickled."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifold_tying._json import check_regular, parsed, read_bytes
from manifold_tying.tying import PIT

# The last two parts of a parameter's name, by Hugging Face's architectures: Llama, Qwen, Granite, Gemma, OPT and Phi;
# GPT-2; GPT-NeoX; BLOOM and Falcon; Mamba.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_OURS = "interface."
_MEMORY = "parametrizations.memory.original"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SavedTables(NamedTuple):
    """What a folder says about its token interface."""

    E: Tensor  # (V, d)
    W_out: Tensor  # (d, V)
    description: str


def inspect_tables(path: str | Path) -> SavedTables:
    """E (V, d), W_out (d, V) and a line of description of a saved model; only these tensors are read.

    Args:
        path: a run of ``manifold-tying train`` (its newest checkpoint), one of its checkpoints, or a folder in Hugging
            Face's form: config.json and model.safetensors, whole or sharded with an index, tied or untied.

    Raises:
        ValueError: a file is missing or damaged, or no table is found in it; says which and what to do.
        ImportError: safetensors is not installed.
    """
    return saved_interface(path)[0]


def saved_interface(path: str | Path) -> tuple[SavedTables, PIT | None]:
    """:func:`inspect_tables`, and the PIT interface that the tables are of, where they are of one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"expected the folder of a run, a checkpoint or a Hugging Face model, got {folder}")
    saved = sorted((folder / "checkpoints").glob("step-*"))
    if saved:
        folder = saved[-1]
    if (folder / "state.json").exists():
        return _of_checkpoint(folder)
    if (folder / "config.json").exists():
        return _of_hugging_face(folder)
    raise ValueError(f"{folder} has neither checkpoints/, state.json nor config.json: expected a run or a saved model")


def _of_checkpoint(folder: Path) -> tuple[SavedTables, PIT | None]:
    state = _read_json(folder / "state.json")
    if not (folder / _WHOLE).exists() and any(folder.glob("shard-*")):
        raise ValueError(f"{folder} was saved in shards; make one file of it with manifold-tying export {folder} OUT")
    where = dict.fromkeys(_names(folder / _WHOLE), _WHOLE)
    names = [name for name in where if name.startswith(_OURS)]
    tensors = {name.removeprefix(_OURS): tensor for name, tensor in _read(folder, where, names).items()}
    if not ("weight" in tensors or {"embedding", "head"} <= set(tensors) or _MEMORY in tensors):
        raise ValueError(f"{folder / _WHOLE} holds no token interface that is known here; it has {_some(where)}")
    step, config = state.get("step"), state.get("config")
    if type(step) is not int or not isinstance(config, dict):
        raise ValueError(f"{folder / 'state.json'} is damaged: it has no step or no config; take another checkpoint")
    kind = f"checkpoint of step {step}"
    if "weight" in tensors:
        return SavedTables(tensors["weight"], tensors["weight"].mT, f"{kind}, transpose tying"), None
    if _MEMORY not in tensors:
        return SavedTables(tensors["embedding"], tensors["head"].mT, f"{kind}, untied"), None
    pit = _pit(tensors, folder, config)
    return SavedTables(*pit.materialize(), f"{kind}, {config.get('interface', 'pit')}"), pit


def _pit(tensors: dict[str, Tensor], folder: Path, config: dict[str, Any]) -> PIT:
    V, d = tensors[_MEMORY].shape
    with torch.device("meta"):  # the tensors are there already
        pit = PIT(V, d, diagonal=config.get("diagonal", "softplus"), bounds=config.get("bounds"))
    if "bridge" in tensors:
        pit.bridge = torch.nn.Parameter(tensors["bridge"])
    try:
        pit.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder / _WHOLE} holds another kind of PIT than this version's: {error}") from error
    for module in pit.modules():  # buffers that say a dtype and are in no file
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return pit


def _of_hugging_face(folder: Path) -> tuple[SavedTables, PIT | None]:
    config = _read_json(folder / "config.json")
    where = _weight_map(folder)
    text = config.get("text_config", {})
    converted = [name.removesuffix(_MEMORY) for name in where if name.endswith(_OURS + _MEMORY)]
    if converted:  # by this package; the two halves share one interface
        names = [name for name in where if name.startswith(converted[0])]
        tensors = {name.removeprefix(converted[0]): tensor for name, tensor in _read(folder, where, names).items()}
        pit = _pit(tensors, folder, config.get("quantization_config", {}))
        kind = "PIT" if pit.bridge is None else "PIT with a bridge"
        return SavedTables(*pit.materialize(), f"Hugging Face {config.get('model_type', 'model')}, {kind}"), pit
    vocabulary = config.get("vocab_size", text.get("vocab_size"))
    embedding = _one(folder, where, _EMBEDDING, "embedding table", vocabulary)
    if embedding is None:
        raise ValueError(f"no embedding table among the parameters of {folder}; it has {_some(where)}")
    E = _read(folder, where, [embedding])[embedding]
    kind = f"Hugging Face {config.get('model_type', 'model')}, {embedding}"
    head = _one(folder, where, _HEAD, "head", None)
    if head is not None:
        table = _read(folder, where, [head])[head]
        if table.shape != E.shape:
            raise ValueError(f"expected {head} of shape {tuple(E.shape)} as {embedding}, got {tuple(table.shape)}")
        tying = "tied" if torch.equal(E, table) else "untied"
        return SavedTables(E, table.mT, f"{kind} and {head}, {tying}"), None
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)):
        raise ValueError(
            f"{folder} is untied by its config.json and has no head; a shard may be missing: {_some(where)}"
        )
    return SavedTables(E, E.mT, f"{kind}, tied"), None


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file of the folder holds each parameter."""
    if (folder / _WHOLE).exists():
        return dict.fromkeys(_names(folder / _WHOLE), _WHOLE)
    if not (folder / _INDEX).exists():
        raise ValueError(f"{folder} has neither {_WHOLE} nor {_INDEX}; save the model with safe_serialization=True")
    where = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(where, dict) or any(Path(str(file)).name != file for file in where.values()):
        raise ValueError(f"{folder / _INDEX} is damaged: expected a weight_map of parameters to files of this folder")
    return where


def _one(folder: Path, where: dict[str, str], pattern: re.Pattern[str], what: str, rows: int | None) -> str | None:
    """The parameter that matches; of several the one with enough rows, for a vision tower has embeddings too."""
    found = [name for name in where if pattern.search(name)]
    if len(found) > 1 and rows is not None:
        found = [name for name in found if _shape(folder / where[name], name)[0] >= rows]
    if len(found) > 1:
        raise ValueError(
            f"expected one {what} in {folder}, found {', '.join(found)}: which one reads the tokens is unclear"
        )
    return found[0] if found else None


def _names(file: Path) -> list[str]:
    with _open(file) as tensors:
        return list(tensors.keys())


def _shape(file: Path, name: str) -> list[int]:
    with _open(file) as tensors:
        return tensors.get_slice(name).get_shape()


def _read(folder: Path, where: dict[str, str], names: list[str]) -> dict[str, Tensor]:
    read = {}
    for name in names:
        with _open(folder / where[name]) as tensors:
            if name not in tensors.keys():
                raise ValueError(f"{folder / where[name]} lacks {name}, which the index names; download it again")
            read[name] = tensors.get_tensor(name)
    return read


def _open(file: Path) -> Any:
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
        raise ValueError(f"{file} cannot be read ({error}); it is missing or damaged") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parsed(read_bytes(file).decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); it is missing or damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def _some(where: dict[str, str]) -> str:
    return ", ".join(sorted(where)[:5]) + (f" and {len(where) - 5} more" if len(where) > 5 else "")
