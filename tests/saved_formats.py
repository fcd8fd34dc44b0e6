"""Every format that the package writes, a few kilobytes each. `python tests/saved_formats.py` records this version's.

tests/data/formats has a folder for each version that was released. Later versions must read all of them.
"""

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_models import V, build
from peft import PeftModel, get_peft_model
from references import reference
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.peft import PoetConfig, StiefelLoraConfig
from manifold_tying.training.checkpoint import checkpoints, load_checkpoint
from manifold_tying.training.data import open_tokens, prepare
from manifold_tying.training.saving import stage_checkpoint, write_checkpoint

FOLDER = Path(__file__).resolve().parent / "data/formats"
IDS = torch.arange(12).view(2, 6)
CONFIG = {"interface": "pit-trainable"}
LAYERS: dict[str, Callable[[nn.Linear], Any]] = {
    "stiefel": mt.stiefel,
    "orthogonal polar": mt.orthogonal,
    "orthogonal qr": partial(mt.orthogonal, map="qr"),
    "orthogonal cayley": partial(mt.orthogonal, map="cayley"),
    "spd": lambda layer: mt.spd(layer, "weight"),
    "sphere": mt.sphere,
    "low rank": lambda layer: mt.low_rank(layer, rank=2),
    "isospectral": mt.isospectral,
    "doubly stochastic": mt.doubly_stochastic,
    "equivalence": lambda layer: mt.equivalence(layer, block_size=2, seed=3),
    "any manifold": lambda layer: mt.constrain(layer, "weight", mt.SPD()),
}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "poet": lambda: PoetConfig(block_size=4, permute=True, magnitude=True, target_modules=["q_proj"]),
    "stiefel-lora": lambda: StiefelLoraConfig(r=2, target_modules=["q_proj"]),
}


class Format(NamedTuple):
    save: Callable[[Path], None]
    load: Callable[[Path], Tensor]
    """What the saved object computes."""


def moved(module: Any) -> Any:
    """Away from the start, on the manifolds."""
    optimizer = RiemannianAdam(param_groups(module), lr=0.05)
    for p in module.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    return module


def constrained() -> nn.ModuleDict:
    layers: dict[str, nn.Module] = {}
    for name, constrain in LAYERS.items():
        layer = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            layer.weight.copy_(layer.weight @ layer.weight.T + torch.eye(4))
        layers[name] = constrain(layer)
    return nn.ModuleDict(layers)


def load_constrained(folder: Path) -> Tensor:
    layers: Any = constrained()
    layers.load_state_dict(load_file(folder / "constraints.safetensors"))
    return torch.stack([layer.weight.detach() for layer in layers.values()])


def run() -> tuple[Any, RiemannianAdam]:
    model = reference(mt.PIT(24, 8, memory="trainable"))
    return model, RiemannianAdam(param_groups(model), lr=0.05)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.loss(IDS, IDS.roll(1)).backward()
    optimizer.step()


def save_checkpoint(folder: Path) -> None:
    model, optimizer = run()
    step(model, optimizer)
    write_checkpoint(folder, stage_checkpoint(1, model, optimizer, CONFIG))


def load_run(folder: Path) -> Tensor:
    model, optimizer = run()
    load_checkpoint(checkpoints(folder)[-1], model, optimizer, CONFIG)
    step(model, optimizer)  # with the saved moments
    return model(IDS).detach()


def base() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(OrderedDict(q_proj=nn.Linear(8, 8)))


def save_adapter(name: str, folder: Path) -> None:
    save_file(base().state_dict(), folder / "base.safetensors")
    moved(get_peft_model(base(), ADAPTERS[name]())).save_pretrained(folder / "adapter")
    (folder / "adapter/README.md").unlink()


def load_adapter(folder: Path) -> Tensor:
    model = base()
    model.load_state_dict(load_file(folder / "base.safetensors"))
    adapted: Any = PeftModel.from_pretrained(model, folder / "adapter")
    return adapted(torch.linspace(-1, 1, 16).view(2, 8)).detach()


def save_tokens(folder: Path) -> None:
    text = folder / "text"
    text.write_text("a few words, and a few more of them. " * 40)
    with contextlib.chdir(folder):
        prepare("text:text", vocab_size=280, cache=folder / "cache").rename(folder / "tokens")
    shutil.rmtree(folder / "cache")
    text.unlink()


FORMATS: dict[str, Format] = {
    "constraints": Format(
        lambda folder: save_file(moved(constrained()).state_dict(), folder / "constraints.safetensors"),
        load_constrained,
    ),
    "checkpoint": Format(save_checkpoint, load_run),
    "converted": Format(
        lambda folder: mt.save(mt.convert(build(), transform="rotation"), folder / "model"),
        lambda folder: AutoModelForCausalLM.from_pretrained(folder / "model")(IDS % V).logits.detach(),
    ),
    "adapter poet": Format(partial(save_adapter, "poet"), load_adapter),
    "adapter stiefel-lora": Format(partial(save_adapter, "stiefel-lora"), load_adapter),
    "tokens": Format(
        save_tokens, lambda folder: torch.from_numpy(open_tokens(folder / "tokens").train[:100].astype("int64"))
    ),
}


def record(version: Path) -> None:
    """Write a folder with every format, and what each computes."""
    expected = {}
    for name, form in FORMATS.items():
        torch.manual_seed(0)
        folder = version / name.replace(" ", "-")
        folder.mkdir(parents=True)
        form.save(folder)
        expected[name] = form.load(folder).contiguous()
    save_file(expected, version / "expected.safetensors")


if __name__ == "__main__":
    shutil.rmtree(FOLDER / mt.__version__, ignore_errors=True)
    record(FOLDER / mt.__version__)
