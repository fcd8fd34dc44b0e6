"""The data of a run: its tokens, cut into batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manifold_tying.training.config import Settings, TrainConfig, checkpoint_hashes
from manifold_tying.training.data import Batches, TokenData, open_tokens, prepare, validation_batches
from manifold_tying.training.data.tokens import identity_of
from manifold_tying.training.evaluate import Batch
from manifold_tying.training.processes import ALONE, Processes


@dataclass(frozen=True)
class RunData:
    """A run's batches, and the fingerprint of its text and of the checkpoint that it starts from."""

    batches: Batches
    held_out: list[Batch]
    identity: dict[str, Any]


def run_data(tokens: TokenData, settings: Settings, seed: int) -> RunData:
    """Cut a run's batches from its tokens; raises ValueError if there are too few."""
    batches = Batches(tokens.train, batch_size=settings.batch_size, sequence_length=settings.sequence_length, seed=seed)
    held_out = validation_batches(
        tokens.val,
        batch_size=max(settings.batch_size // settings.accumulate, 1),
        sequence_length=settings.sequence_length,
        max_tokens=max(settings.val_tokens, settings.sequence_length),
    )
    identity = identity_of(tokens, sum(targets.numel() for _, targets in held_out))
    of_start = {} if settings.init_from is None else checkpoint_hashes(settings.init_from)
    return RunData(batches, held_out, identity | of_start)


def load_data(
    config: TrainConfig, processes: Processes = ALONE, progress: Callable[[str], None] | None = None
) -> TokenData:
    """A run's tokens; rank 0 prepares them if they are not cached. ``progress`` receives messages."""
    if processes.size > 1:
        processes.on_main(lambda: load_data(config, progress=progress))
        return processes.raise_together(lambda: load_data(config))
    settings, length = config.settings, config.settings.sequence_length
    wanted = max(settings.val_tokens, length)
    tokens = open_tokens(
        prepare(
            settings.data,
            vocab_size=settings.vocab_size,
            tokens_needed=settings.steps * settings.tokens_per_step + settings.val_tokens,
            held_out_needed=wanted + 1,  # the target of the last input
            tokenizer=settings.tokenizer,
            progress=progress,
        )
    )
    available, wanted = (len(tokens.val) - 1) // length * length, wanted // length * length
    if progress and 0 < available < wanted:
        progress(f"{settings.data} is small: evaluating on {available:,} held-out tokens, not on {wanted:,}")
    return tokens
