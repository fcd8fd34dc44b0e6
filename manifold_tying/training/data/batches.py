"""Batches as pure functions: the same arguments give the same batch in every run and process."""

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Training batches of windows of N + 1 tokens, which start at the multiples of N = sequence_length.

    Every window is drawn once per epoch, in an order that depends only on (seed, epoch); the last batch of an epoch
    continues into the next one. :meth:`batch` is stateless, so a resumed run needs only its step.

    Raises:
        ValueError: there is no complete window, or batch_size, sequence_length or seed is out of range.
    """

    def __init__(self, tokens: np.ndarray, *, batch_size: int, sequence_length: int, seed: int) -> None:
        self._windows = _window_count(tokens, batch_size, sequence_length, "training tokens")
        if seed < 0:
            raise ValueError(f"expected seed >= 0, got {seed}")
        self._tokens = tokens
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(inputs (B, N), targets (B, N)), int64; a target is the token after its input. Raises ValueError if step < 0."""
        if step < 0:
            raise ValueError(f"expected step >= 0, got {step}")
        first = step * self.batch_size
        return _gather(self._tokens, [self._window(first + i) for i in range(self.batch_size)], self.sequence_length)

    def _window(self, position: int) -> int:
        """The window at a position of the endless sequence of epochs."""
        epoch, place = divmod(position, self._windows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self._windows)
        return int(self._order[1][place])


def validation_batches(
    tokens: np.ndarray, *, batch_size: int, sequence_length: int, max_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """The first windows in order, at most max_tokens targets, as (inputs (b, N), targets (b, N)) with b <= batch_size.

    Only the last batch can be smaller, so weight batches by their number of targets when averaging.

    Raises:
        ValueError: there is no complete window, max_tokens is below sequence_length, or a size is out of range.
    """
    windows = min(_window_count(tokens, batch_size, sequence_length, "held-out tokens"), max_tokens // sequence_length)
    if windows < 1:
        raise ValueError(f"expected max_tokens >= sequence_length = {sequence_length}, got {max_tokens}")
    starts = range(0, windows, batch_size)
    return [_gather(tokens, range(s, min(s + batch_size, windows)), sequence_length) for s in starts]


def _window_count(tokens: np.ndarray, batch_size: int, sequence_length: int, what: str) -> int:
    if batch_size < 1 or sequence_length < 1:
        raise ValueError(f"expected positive sizes, got {batch_size=}, {sequence_length=}")
    windows = (len(tokens) - 1) // sequence_length
    if windows < 1:
        raise ValueError(
            f"expected at least {sequence_length + 1} {what} for one sequence and the token after it, got {len(tokens)}; "
            "use a larger corpus (every 20th document is held out) or a smaller sequence_length"
        )
    return windows


def _gather(tokens: np.ndarray, windows: list[int] | range, length: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.stack([tokens[w * length : (w + 1) * length + 1] for w in windows]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
