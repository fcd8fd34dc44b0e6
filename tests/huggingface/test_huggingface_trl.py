"""TRL computes log-probabilities from the hidden states and the head's weight, and never calls the head."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from huggingface_models import D, V, build, ids, interface, optimizer_for
from peft import get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import manifold_tying as mt
from manifold_tying.optim import RiemannianAdam, param_groups
from manifold_tying.peft import PoetConfig, StiefelLoraConfig


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, V)}}, unk_token="<pad>")
    )
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def test_sft_trainer_trains_as_trainer_does(tmp_path: Path) -> None:
    rows = ids(4, 12).tolist()
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    settings = SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, activation_checkpointing=False, dataloader_pin_memory=False, seed=0,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    model, plain = (mt.convert(build()).train() for _ in range(2))
    sft = SFTTrainer(
        model, settings, train_dataset=dataset, processing_class=tokenizer(), optimizers=(optimizer_for(model), None)
    )
    stock = Trainer(plain, settings, train_dataset=dataset, optimizers=(optimizer_for(plain), None))
    assert losses_of(sft) == pytest.approx(losses_of(stock), abs=1e-5)
    E, W_out = interface(model).materialize()
    assert torch.dist(W_out @ E, torch.eye(D)) <= 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # TRL 1.16 calls it
def test_the_reference_of_dpo_is_the_converted_model(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "stock")
    model = mt.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"))

    def trainer() -> DPOTrainer:
        settings = DPOConfig(
            output_dir=str(tmp_path / "run"), max_steps=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            bf16=False, disable_tqdm=True, activation_checkpointing=False, dataloader_pin_memory=False,
        )  # fmt: skip
        data = datasets.Dataset.from_dict(PAIRS)
        return DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer())

    with pytest.raises(OSError, match="not saved"):  # not the stock model in silence
        trainer()
    mt.save(model, tmp_path / "converted")
    assert losses_of(trainer())[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its reference


TARGETS = ["q_proj", "down_proj"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "poet": lambda: PoetConfig(block_size=4, target_modules=TARGETS),
    "stiefel lora": lambda: StiefelLoraConfig(r=2, target_modules=TARGETS),
}
PAIRS = {"prompt": ["w5 w6"] * 4, "chosen": [" w8 w9"] * 4, "rejected": [" w20"] * 4}
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"text": ["w5 w6 w8 w9"] * 4}, {}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {}),
    "grpo": (
        GRPOTrainer,
        lambda **options: GRPOConfig(num_generations=2, max_completion_length=4, beta=0.1, **options),
        {"prompt": PAIRS["prompt"]},
        {"reward_funcs": lambda completions, **_: [float(i % 2) for i in range(len(completions))]},
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_move_the_adapters_alone(kind: str, adapter: str, tmp_path: Path) -> None:
    make, settings, data, options = TRAINERS[kind]
    model: Any = get_peft_model(build(), ADAPTERS[adapter]())
    parameters = dict(model.named_parameters())  # some trainers add a second adapter, the reference
    before = {name: p.detach().clone() for name, p in parameters.items()}
    trainer = make(
        model,
        args=settings(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
            report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, activation_checkpointing=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
        optimizers=(RiemannianAdam(param_groups(model), lr=1e-2), None),
        **options,
    )  # fmt: skip
    losses = losses_of(trainer)
    moved = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in parameters.items() if p.requires_grad}
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    if kind == "dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and losses[1] < losses[0]
