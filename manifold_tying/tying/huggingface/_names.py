"""Find the names of the embedding and the head in the files of a stock checkpoint."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manifold_tying.tying.huggingface._folder import build_empty, model_class, read_config, read_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Name endings for unknown classes: Llama, Qwen, Granite, Gemma, OPT and Phi; GPT-2; GPT-NeoX; BLOOM and Falcon; Mamba.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")


def table_names(folder: Path, where: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    """(embedding's name, head's name, whether a missing head is the embedding); ``where`` maps each tensor to its file.

    Uses the model's class if transformers has it, otherwise common names.
    """
    try:
        model_class(folder)
    except (ValueError, ModuleNotFoundError):
        return _usual_names(folder, where)
    return _names_of_class(folder, where)


def _names_of_class(folder: Path, where: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    model = build_empty(folder)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = _accessed(model, "input"), _accessed(model, "output")
    if id(embedding) not in names or id(head) not in names:
        raise ValueError(
            f"expected a language model in {folder}, but {type(model).__name__} has no embedding or no head "
            "(get_input_embeddings, get_output_embeddings)"
        )
    inside, outside = f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"
    tied = _tied_with(inside, model.all_tied_weights_keys)
    table, score = _stored(model, (inside, *sorted(tied)), where), _stored(model, (outside,), where)
    return table, None if score == table else score, outside in tied


def _accessed(model: Any, side: str) -> Any:
    try:
        return getattr(model, f"get_{side}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


def _tied_with(name: str, pairs: Mapping[str, str]) -> set[str]:
    """All other names of the tensor."""
    source = pairs.get(name, name)
    return ({target for target, of in pairs.items() if of == source} | {source}) - {name}


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


def _usual_names(folder: Path, where: Mapping[str, str]) -> tuple[str | None, str | None, bool]:
    config = read_config(folder)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    rows = config.get("vocab_size", text.get("vocab_size"))
    embeddings = [name for name in where if _EMBEDDING.search(name)]
    if len(embeddings) > 1 and isinstance(rows, int):  # exclude embeddings of a vision tower
        shapes = read_shapes(folder / where[name] for name in embeddings)
        embeddings = [name for name in embeddings if shapes[name][:1] >= [rows]]
    heads = [name for name in where if _HEAD.search(name)]
    for what, found in (("embedding table", embeddings), ("head", heads)):
        if len(found) > 1:
            raise ValueError(
                f"expected one {what} in {folder}, found {', '.join(found)}: cannot tell which one reads the tokens"
            )
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
    return next(iter(embeddings), None), next(iter(heads), None), tied
