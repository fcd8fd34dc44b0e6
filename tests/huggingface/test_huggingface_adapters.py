"""An interface that trains below adapters is in their checkpoints, and Trainer goes on from it."""

import copy
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from huggingface_models import Repeated, V, arguments, build, difference, interface, logits, optimizer_for
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import manifold_tying as mt
from manifold_tying.huggingface import train_interface
from manifold_tying.linalg import defect

# transformers 5.23 renames what PEFT 0.21 calls
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]


def adapted(**options: Any) -> Any:
    """Drawn from the same seed each time, adapters included."""
    model = mt.convert(build(), **{"memory": "trainable", **options})
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def trained(lora: Any, out: Path, resume: str | None = None) -> Trainer:
    trainer = Trainer(
        lora, arguments(out, 10), train_dataset=Repeated(), optimizers=(optimizer_for(lora), cast(Any, None))
    )
    trainer.train(resume_from_checkpoint=resume)
    lora.eval()
    return trainer


def test_a_checkpoint_of_trainer_has_the_interface(tmp_path: Path) -> None:
    lora = adapted(bridge=True)
    start = interface(lora.get_base_model()).memory.detach().clone()
    train_interface(lora)
    trainer = trained(lora, tmp_path / "run")
    Z = interface(lora.get_base_model()).memory
    assert difference(Z, start) > 1e-3 and defect(Z) <= 1e-6  # the control: it has moved
    trainer.save_model(str(tmp_path / "last"))
    for folder in (tmp_path / "run" / "checkpoint-10", tmp_path / "last"):
        tensors = load_file(folder / "adapter_model.safetensors")
        assert [t.shape for t in tensors.values()].count(Z.shape) == 1  # once, not for both halves
        again = peft.PeftModel.from_pretrained(mt.convert(build(), bridge=True, memory="trainable"), folder).eval()
        assert difference(logits(again), logits(lora)) <= 1e-6
    merged = again.merge_and_unload()
    mt.save(merged, tmp_path / "merged")
    assert difference(logits(mt.load(tmp_path / "merged")), logits(lora)) <= 1e-5
    resumed = adapted(bridge=True)
    train_interface(resumed)
    trained(resumed, tmp_path / "run", str(tmp_path / "run" / "checkpoint-5"))
    assert difference(logits(resumed), logits(lora)) <= 1e-5


def test_a_frozen_memory_stays_frozen() -> None:
    lora = adapted(memory="frozen", bridge=True)
    train_interface(lora)
    trains = {name: p.requires_grad for name, p in interface(lora.get_base_model()).named_parameters()}
    assert sorted(trains.values()) == [False, True, True] and not trains["parametrizations.memory.original"]
    twin = copy.deepcopy(lora)
    assert twin.save_pretrained.args == (twin,)
    with pytest.warns(UserWarning, match="vocabulary"):
        assert twin.get_base_model().resize_token_embeddings(V + 4).saved_with_adapters


def test_an_interface_that_would_be_left_out_is_named(tmp_path: Path) -> None:
    lora = adapted()
    lora.save_pretrained(tmp_path / "frozen")  # nothing of it trains
    for p in interface(lora.get_base_model()).parameters():
        p.requires_grad_(True)
    with pytest.warns(UserWarning, match="train_interface"):
        lora.save_pretrained(tmp_path / "left out")
    lora.get_base_model().state_dict()  # has everything


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="PeftModel"):
        train_interface(mt.convert(build()))
    with pytest.raises(ValueError, match="PeftModel"):
        train_interface(nn.Linear(2, 2))
    config = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="converted by"):
        train_interface(peft.get_peft_model(build(), config))


def test_an_adapter_names_the_converted_checkpoint_as_its_base(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "stock")
    model = mt.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))
    assert "stock" not in str(model.config.name_or_path)
    mt.save(model, tmp_path / "converted")
    for base in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "converted")):
        lora = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        )
        lora.save_pretrained(str(tmp_path / "adapter"))
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert difference(logits(again), logits(lora.eval())) <= 1e-6
