"""Damaged checkpoint folders: every command names what is wrong, exits with 2 and writes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import run, tree
from huggingface_models import build
from safetensors.torch import load_file, save_file

import manifold_tying as mt

Damage = Callable[[Path], object]
WEIGHTS, INDEX, EMBEDDING = "model.safetensors", "model.safetensors.index.json", "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def config(**changes: Any) -> Damage:
    """Entries of config.json, changed or, with ``...``, removed."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))

    return damage


def marked(**changes: Any) -> Damage:
    """The same of its mark."""

    def damage(folder: Path) -> None:
        mark = {**json.loads((folder / "config.json").read_text())["manifold_tying"], **changes}
        config(manifold_tying={name: value for name, value in mark.items() if value is not ...})(folder)

    return damage


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def tensors(**changes: Any) -> Damage:
    """Tensors of the file: a function of the old one, or ``...`` to remove it."""

    def damage(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        for name, change in changes.items():
            old = state.pop(name, torch.zeros(2, 2))
            if change is not ...:
                state[name] = change(old).contiguous()
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def index(file: str) -> Damage:
    """An index that finds all tensors in this file, in the place of the one file, which lies outside the folder, too."""

    def damage(folder: Path) -> None:
        shutil.copy(folder / WEIGHTS, folder.parent / WEIGHTS)
        where = dict.fromkeys(load_file(folder / WEIGHTS), file)
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))

    return damage


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-3])


def spoiled(old: torch.Tensor) -> torch.Tensor:
    new = old.clone()
    new.view(-1)[0] = torch.nan
    return new


# Damages of the tables themselves, which `inspect` refuses, too.
OF_TABLES = {
    "embedding has NaN", "index leads up", "weights are cut", "table is NaN", "table lost its rank", "scale missing",
    "a table beside it",
}  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
ANY: dict[str, tuple[Damage, str]] = {  # of a stock checkpoint and of a converted one
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is a list": (text("config.json", "[]"), "expected a JSON object"),
    "config is deep": (text("config.json", DEEP), "config.json is not JSON"),
    "generation config is null": (text("generation_config.json", "null"), "transformers cannot build a LlamaForCausalLM"),
    "entry is a list": (config(quantization_config=[1]), "quantization_config"),
    "architectures missing": (config(architectures=...), "to name the model's class"),
    "architectures function": (config(architectures=["pipeline"]), "not a model class of transformers"),
    "architectures of no head": (config(architectures=["LlamaModel"]), ""),
    "architectures of another family": (config(architectures=["GraniteForCausalLM"]), "cannot build a GraniteForCausalLM"),
    "model type unknown": (config(model_type="no such"), "does not know the model"),
    "sizes are text": (config(hidden_size="wide"), "config.json"),
    "fewer layers": (config(num_hidden_layers=1), "model.layers.1"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "expected weights as safetensors"),
    "weights are cut": (cut, f"{WEIGHTS} cannot be read"),
    "weights are pickled": (pickled, "Load pickled weights (.bin) with transformers"),
    "layer is missing": (tensors(**{UP: ...}), UP),
    "layer is too much": (tensors(**{"model.layers.7.extra": torch.clone}), "model.layers.7.extra"),
    "layer has another shape": (tensors(**{UP: lambda old: old[:-1]}), UP),
    "index leads up": (index("../model.safetensors"), "safetensors files of this folder"),
    "index names a pickle": (index("pytorch_model.bin"), "safetensors files of this folder"),
    "index names a lost shard": (index("model-00002-of-00002.safetensors"), "model-00002-of-00002"),
}  # fmt: skip
STOCK: dict[str, tuple[Damage, str]] = {
    "embedding is missing": (tensors(**{EMBEDDING: ...}), EMBEDDING),
    "embedding has NaN": (tensors(**{EMBEDDING: spoiled}), "NaN"),
    "quantized": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "it is quantized"),
}
CONVERTED: dict[str, tuple[Damage, str]] = {
    "mark is missing": (config(manifold_tying=...), "not a converted model"),
    "mark is a list": (config(manifold_tying=[1]), 'config.json to be {"scale"'),
    "unknown entry": (marked(colour="red"), 'config.json to be {"scale"'),
    "scale missing": (marked(scale=...), 'config.json to be {"scale"'),
    "scale is 0": (marked(scale=0), 'config.json to be {"scale"'),
    "scale is NaN": (marked(scale=float("nan")), 'config.json to be {"scale"'),
    "rotated is None": (marked(rotated=None), 'config.json to be {"scale"'),
    "tie flag": (config(tie_word_embeddings=False), "tie_word_embeddings"),
    "table is NaN": (tensors(**{EMBEDDING: spoiled}), "NaN"),
    "table lost its rank": (tensors(**{EMBEDDING: torch.zeros_like}), "full column rank"),
    "table has another shape": (tensors(**{EMBEDDING: lambda old: old[:-1]}), "disagree"),
    "table is missing": (tensors(**{EMBEDDING: ...}), EMBEDDING),
    "a table beside it": (tensors(**{"lm_head.weight": lambda _: torch.ones(96, 16)}), "another weight"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("intact")
    build().save_pretrained(root / "stock")
    mt.save(mt.convert(build()), root / "converted")
    return root


@pytest.mark.parametrize("command", ["convert", "export"])
def test_intact_folders_pass(command: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: what the other tests refuse, they refuse for the damage."""
    source = folders / ("stock" if command == "convert" else "converted")
    for words in ([command, str(source), str(tmp_path / "out")], ["inspect", str(tmp_path / "out")]):
        assert run(words, capsys)[0] == 0


@pytest.mark.parametrize(
    ("kind", "damage"),
    [("stock", name) for name in (*ANY, *STOCK)] + [("converted", name) for name in CONVERTED],
)
def test_damaged_folders_are_refused(
    kind: str, damage: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(folders / kind, tmp_path / "damaged")
    hurt, phrase = (ANY | (STOCK if kind == "stock" else CONVERTED))[damage]
    hurt(source)
    before, command = tree(tmp_path), "convert" if kind == "stock" else "export"
    status, error = run([command, str(source), str(tmp_path / "out")], capsys)
    assert status == 2 and "error: " in error and phrase in error and "Traceback" not in error
    assert "ignore_mismatched_sizes" not in error  # the advice that leads to random tables
    status, error = run(["inspect", str(source)], capsys)  # an error or, where the tables are intact, a table
    assert damage not in OF_TABLES or (status == 2 and "error: " in error and str(source) in error)
    assert tree(tmp_path) == before and not (tmp_path / "out").exists()


def test_a_table_with_nan_is_not_saved(folders: Path, tmp_path: Path) -> None:
    model: Any = mt.load(folders / "converted")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf in it"):
        mt.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
