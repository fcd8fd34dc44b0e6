"""TRL computes log-probabilities from the hidden states and the head's weight, and never calls the head."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from huggingface_models import D, build, ids, interface, optimizer_for
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

import manifold_tying as mt


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("memory", ["free", "trainable"])
def test_sft_trainer_trains_as_trainer_does(memory: Any, tmp_path: Path) -> None:
    rows = ids(4, 12).tolist()
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    settings = SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, activation_checkpointing=False, dataloader_pin_memory=False, seed=0,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    model, plain = (mt.convert(build(), memory=memory).train() for _ in range(2))
    sft = SFTTrainer(
        model, settings, train_dataset=dataset, processing_class=tokenizer, optimizers=(optimizer_for(model), None)
    )
    stock = Trainer(plain, settings, train_dataset=dataset, optimizers=(optimizer_for(plain), None))
    assert losses_of(sft) == pytest.approx(losses_of(stock), abs=1e-5)
    E, W_out = interface(model).materialize()
    assert torch.dist(W_out @ E, torch.eye(D)) <= 1e-4
