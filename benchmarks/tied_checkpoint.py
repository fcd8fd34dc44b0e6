"""A small tied model to continue from: transformers' Llama at the sizes of nano, trained on the standard library's source.

    python -m benchmarks.tied_checkpoint runs/tied --steps 1500

AdamW as in any script, so that what is converted later is an ordinary checkpoint. Writes the folder again every 250 steps.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from manifold_tying.training import Settings
from manifold_tying.training._build import rate_factor
from manifold_tying.training.data import Batches, open_tokens, prepare, validation_batches

V, N, BATCH = 4096, 128, 8
LR, WEIGHT_DECAY = 4e-3, 0.1


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def main(out: Path, steps: int) -> None:
    data = open_tokens(prepare("stdlib", vocab_size=V))
    model = build()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    batches = Batches(data.train, batch_size=BATCH, sequence_length=N, seed=0)
    held_out = validation_batches(data.val, batch_size=BATCH, sequence_length=N, max_tokens=16384)
    schedule = Settings(steps=steps, warmup_steps=min(100, steps))

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), targets.flatten())

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * rate_factor(step, schedule)
        optimizer.zero_grad()
        loss_of(*batches.batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0 or step + 1 == steps:
            with torch.no_grad():
                val_loss = sum(loss_of(*batch).item() for batch in held_out) / len(held_out)
            print(f"step {step + 1}: validation loss {val_loss:.4f}", flush=True)
            model.save_pretrained(out)
            shutil.copy(data.directory / "tokenizer.json", out / "tokenizer.json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args(sys.argv[1:])
    main(arguments.out, arguments.steps)
