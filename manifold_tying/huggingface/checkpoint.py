"""Save, load and export converted models; read the folder of a transformers checkpoint, of which nothing is executed."""

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manifold_tying._json import read_object
from manifold_tying._safetensors import DAMAGED, check_readable, weight_map, whole_shapes
from manifold_tying.huggingface.native import MARK, check_mark, import_transformers, mark, pit_embedding, unmarked
from manifold_tying.huggingface.tables import check_adapters
from manifold_tying.parametrizations import constraints

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ASSUME_TYING = ("gemma", "cohere")  # model families whose serving converters assume tied tables
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


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


def write(model: "PreTrainedModel", path: Path) -> None:
    """``save_pretrained`` to a temporary folder, then replace the old files and remove stale shards.

    The temporary folder is hidden inside ``path``, because files move only within a file system and ``path`` may be a mount.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder to write to, but {path} is a file")
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{path} holds an adapter, which transformers would apply to this model; remove it, or choose another folder"
        )
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=path))
    try:
        model.save_pretrained(draft)
        written = {file.name for file in draft.iterdir()}
        if not any(draft.glob("model*.safetensors")):
            raise ValueError(
                f"expected {type(model).__name__}.save_pretrained to write model.safetensors, but it wrote "
                f"{', '.join(sorted(written)) or 'nothing'}; {path} is unchanged"
            )
        for name in written:
            os.replace(draft / name, path / name)
        for pattern in _WEIGHTS:
            for file in path.glob(pattern):
                if file.name not in written:
                    file.unlink()
    finally:
        shutil.rmtree(draft)
        if new and not any(path.iterdir()):
            path.rmdir()


def save(model: "PreTrainedModel", path: str | os.PathLike[str]) -> None:
    """``model.save_pretrained`` of a converted model, checked and with all files replaced at once.

    ``AutoModelForCausalLM.from_pretrained`` reads the folder where manifold_tying is imported; elsewhere transformers refuses
    it. For other programs write a stock checkpoint with :func:`export`. The model is then named after the folder, so that
    adapters and reference models find it.

    Args:
        model: a model converted by :func:`convert`.
        path: output folder, created if missing.

    Raises:
        ValueError: the model is not converted or no longer tied, has adapters or constrained weights, which a transformers
            checkpoint cannot store, or a table that is not finite or not of full rank; or the folder holds an adapter.
    """
    check_adapters(model)
    if constrained := [name for name, *_ in constraints(model)]:
        raise ValueError(
            f"expected plain weights, but {', '.join(constrained)} are constrained. A transformers checkpoint cannot store "
            "constraints: call manifold_tying.materialize on those layers, or save model.state_dict() instead"
        )
    _check_table(model)
    mark(model.config, **getattr(model.config, MARK))  # again: PEFT unties the config when it merges
    write(model, Path(path))
    model.name_or_path = model.config.name_or_path = os.fspath(path)


def load(path: str | os.PathLike[str], **options: Any) -> "PreTrainedModel":
    """Load a converted model in the class that its config.json names; no tensor may be missing or left over.

    Args:
        path: folder of the checkpoint.
        options: passed to the class's ``from_pretrained``.

    Raises:
        ValueError: not a converted checkpoint, its parts disagree, or its table is not finite or not of full rank.
    """
    import_transformers()
    if recorded_mark(Path(path)) is None:
        raise ValueError(
            f"{path} is not a converted model: its config.json has no entry {MARK!r}. Load it with transformers and convert it"
        )
    model = _read(Path(path), **options)
    _check_table(model)
    return model


@torch.no_grad()
def _check_table(model: "PreTrainedModel") -> None:
    """ValueError unless the model is converted and its table is finite and has full rank, or is offloaded."""
    embedding = pit_embedding(model)
    W = embedding.weight
    if not W.is_meta and not embedding(torch.zeros(1, dtype=torch.int64, device=W.device)).isfinite().all():
        raise ValueError("expected a finite table W, got NaN or Inf in it: the weights are damaged")


def load_stock(folder: Path, **options: Any) -> "PreTrainedModel":
    """Load a stock checkpoint as :func:`load` does a converted one; ValueError for a quantized or pickled one.

    Skips masks and modules that the class lacks, such as a pooler, but no numbered layer, with a warning.
    """
    if recorded_mark(folder) is not None:
        raise ValueError(f"{folder} is already converted; export it first to convert it with other options")
    if entry := read_config(folder).get("quantization_config"):
        raise ValueError(
            f"expected a floating-point checkpoint, but {folder / 'config.json'} has a quantization_config: it is quantized "
            f"({entry!r:.80}). Convert the unquantized model"
        )
    return _read(folder, spare=True, **options)


def _read(folder: Path, *, spare: bool = False, **options: Any) -> "PreTrainedModel":
    config = read_transformers_config(folder)
    kind = model_class(config, folder / "config.json")
    check_readable(folder / file for file in dict.fromkeys(weight_map(folder).values()))
    # The report lists mismatched shapes. Without the option, transformers' error advises ignoring them.
    options = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    options["config"] = config  # transformers would read it as the class wants it, whatever its model_type
    model: PreTrainedModel
    try:
        model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # a damaged config.json or generation_config.json can raise any
        raise ValueError(
            f"transformers cannot build a {kind.__name__} from config.json and the other files in {folder}: "
            f"{type(error).__name__}: {error}"
        ) from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    unexpected = wrong.get("unexpected_keys", [])
    if spare and unexpected and all(_is_spare(model, folder, name) for name in unexpected):
        del wrong["unexpected_keys"]
        listed = ", ".join(unexpected)
        warnings.warn(f"{type(model).__name__} has no place for {listed} of {folder}: skipped", stacklevel=4)
    if wrong:
        raise ValueError(
            f"the parts of the checkpoint in {folder} disagree: {wrong}. No tensor may be skipped or randomly initialized. "
            "Get the missing files, or load the model in Python and pass it to manifold_tying.convert"
        )
    return model


def _is_spare(model: "PreTrainedModel", folder: Path, name: str) -> bool:
    """Whether a tensor can be skipped: its module is absent from the class and is not part of a numbered layer, or it is an
    attention mask or a constant, which early versions of transformers saved."""
    if not re.search(r"\d", name) and name.rpartition(".")[0] not in dict(model.named_modules()):
        return True
    stored = [found for own, found in whole_shapes(folder).items() if name.endswith(own)]  # base models lack a prefix
    return any(not dtype.is_floating_point or not size for size, dtype in stored[:1])


@torch.no_grad()
def export(model: "PreTrainedModel", path: str | os.PathLike[str]) -> None:
    """Write an untied checkpoint that plain transformers loads, with dense tables E and W_outᵀ and the same logits.

    E = W (WᵀW)⁻¹ is computed in float64 and cast once, to the model's dtype. Constrained weights of the body become plain
    weights. The checkpoint has V d more parameters than the converted model.

    Args:
        model: a model converted by :func:`convert`; not changed.
        path: output folder, created if missing.
    """
    check_adapters(model)
    pit_embedding(model)
    if getattr(model, "is_quantized", False):
        raise ValueError(f"expected a floating-point body, got {type(model).__name__} quantized; export it before")
    if away := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise ValueError(
            f"expected the model in memory, but {', '.join(away)} are offloaded or on the meta device; load the model "
            "without a device map"
        )
    config = unmarked(model.config)
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


def _plain_state(model: "PreTrainedModel", names_of_stock: Collection[str]) -> dict[str, Tensor]:
    """State dict of the equivalent stock model. Keeps the stock model's own parametrizations, such as weight norm."""
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if ".parametrizations." not in name or name in names_of_stock
    }
    state |= {name: getattr(owner, attribute).detach() for name, owner, attribute in constraints(model)}
    embedding = pit_embedding(model)
    names = {module: name for name, module in model.named_modules()}
    state[f"{names[embedding]}.weight"] = embedding.materialize()
    # safetensors rejects tensors that share memory, such as BERT's bias; an untied model stores each separately.
    once: set[int] = set()
    for name, tensor in state.items():
        state[name] = tensor.clone() if tensor.data_ptr() in once else tensor
        once.add(tensor.data_ptr())
    return state
