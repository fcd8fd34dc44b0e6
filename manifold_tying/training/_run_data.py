"""The text of a run: the batches that it trains on, and those that it is evaluated on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manifold_tying.training._config import Settings, TrainConfig
from manifold_tying.training._identity import identity_of
from manifold_tying.training._processes import Processes
from manifold_tying.training.data import Batches, TokenData, open_tokens, prepare, validation_batches
from manifold_tying.training.evaluate import Batch


@dataclass(frozen=True)
class RunData:
    """What a run reads, and what tells it from another text."""

    batches: Batches
    held_out: list[Batch]
    identity: dict[str, Any]


def run_data(tokens: TokenData, settings: Settings, seed: int) -> RunData:
    """The batches of a run; ValueError where there are too few tokens for one."""
    batches = Batches(tokens.train, batch_size=settings.batch_size, sequence_length=settings.sequence_length, seed=seed)
    held_out = validation_batches(
        tokens.val,
        batch_size=max(settings.batch_size // settings.accumulate, 1),
        sequence_length=settings.sequence_length,
        max_tokens=_wanted(settings),
    )
    evaluated = sum(targets.numel() for _, targets in held_out)
    return RunData(batches, held_out, identity_of(tokens, evaluated))


def load_data(config: TrainConfig, progress: Callable[[str], None] | None = None) -> TokenData:
    """The tokens of a run, from the cache or made now. Where fewer are held out than are asked for, ``progress`` is told."""
    settings = config.settings
    tokens = open_tokens(
        prepare(
            settings.data,
            vocab_size=settings.vocab_size,
            tokens_needed=settings.steps * settings.tokens_per_step + settings.val_tokens,
            held_out_needed=_wanted(settings) + 1,  # the last target stands behind the last input
            tokenizer=settings.tokenizer,
            progress=progress,
        )
    )
    there = (len(tokens.val) - 1) // settings.sequence_length * settings.sequence_length
    wanted = _wanted(settings) // settings.sequence_length * settings.sequence_length
    if progress and there < wanted:
        progress(f"{settings.data} is small: evaluating on {there:,} held-out tokens, not on {wanted:,}")
    return tokens


def load_data_together(
    config: TrainConfig, processes: Processes, progress: Callable[[str], None] | None = None
) -> TokenData:
    """:func:`load_data`, on one process before the others, so that it alone makes what is not in the cache."""
    if processes.size == 1:
        return load_data(config, progress)
    processes.on_first(lambda: load_data(config, progress))
    return processes.together(lambda: load_data(config))


def _wanted(settings: Settings) -> int:
    """Held-out tokens to evaluate on: one sequence at least."""
    return max(settings.val_tokens, settings.sequence_length)
