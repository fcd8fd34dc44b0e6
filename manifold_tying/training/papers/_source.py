"""The tied checkpoint that continued pretraining starts from, where none is given: made and trained here."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manifold_tying._transformers import import_transformers
from manifold_tying.models import preset
from manifold_tying.training.config import Settings, TrainConfig
from manifold_tying.training.hf_model import OUT
from manifold_tying.training.loop import load_data, train
from manifold_tying.training.progress import Started
from manifold_tying.training.rundir import RESULT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LR, WIDTH = 4e-3, 128  # peak rate at that width, for AdamW from scratch on transformers' own initial weights
WEIGHT_DECAY = 0.1
# The last share of the steps, and its share of the rate: until nothing falls any more.
SETTLING, SETTLING_RATE = 0.25, 0.1


def tied_llama(name: str, positions: int) -> "PreTrainedModel":
    """transformers' Llama with the sizes of a preset and tied tables, drawn from torch's generator."""
    shape, transformers = preset(name), import_transformers()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=positions,
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def trained_source(out: Path, name: str, data: str, steps: int, started: Started | None = None) -> Path:
    """Folder of a tied checkpoint of that preset, trained for so many steps; what is there already is not done again.

    A quarter of the steps settle it: a second run from where the first one ended, whose rate falls from a tenth of the peak
    to a hundredth, as checkpoints that are published were trained to the end of their schedule.
    """
    start = out / "start"
    lr = LR * WIDTH / preset(name).hidden_size
    if not (start / "tokenizer.json").exists():
        made = load_data(TrainConfig(out=start, settings=Settings(preset=name, data=data, steps=steps)))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tied_llama(name, positions=4 * Settings.sequence_length).save_pretrained(start)
        shutil.copy2(made.directory / "tokenizer.json", start)  # last: with it the folder is whole
    settling = round(SETTLING * steps)
    falling = _run(out / "run", start, data, steps - settling, lr, 0, started)
    return _run(out / "settled", falling, data, settling, SETTLING_RATE * lr, 1, started) if settling else falling


def _run(out: Path, init_from: Path, data: str, steps: int, lr: float, seed: int, started: Started | None) -> Path:
    """The checkpoint of one run, trained where it is not there yet; the seed is that of the order of the data."""
    if not (out / RESULT).exists():
        settings = Settings(
            init_from=init_from,
            data=data,
            steps=steps,
            checkpoint_every=-(-steps // 4),
            lr=lr,
            weight_decay=WEIGHT_DECAY,
        )
        observer = started("source", 0, 1, steps) if started else None
        config = TrainConfig(out=out, interface="transpose", seed=seed, resume=True, settings=settings)
        train(config, observer=observer)
    return out / OUT
