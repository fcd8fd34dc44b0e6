"""Writing the shards of a token directory."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from ._tokens import TokenView, shard_path

_BLOCK = 1 << 20  # tokens held in memory while they are moved


class ShardWriter:
    """Appends tokens to ``SPLIT-00000.bin``, ``SPLIT-00001.bin``, ..., each full before the next one is begun.

    Attributes:
        tokens: tokens written so far
        text_bytes: bytes of the text that they stand for
    """

    def __init__(self, directory: Path, split: str, *, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._directory = directory
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self.tokens = 0
        self.text_bytes = 0

    def write(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append tokens (n,)."""
        self.text_bytes += text_bytes
        while len(tokens):
            index, used = divmod(self.tokens, self._shard_tokens)
            if self._file is None or used == 0:
                self.close()
                self._file = shard_path(self._directory, self._split, index).open("ab")
            part = tokens[: self._shard_tokens - used]
            self._file.write(part.astype(self._dtype).tobytes())
            self.tokens += len(part)
            tokens = tokens[len(part) :]

    def close(self) -> None:
        """Close the open shard."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def shards(self) -> list[Path]:
        """The files written so far."""
        return [shard_path(self._directory, self._split, i) for i in range(-(-self.tokens // self._shard_tokens))]

    def view(self) -> TokenView:
        """What was written before :meth:`close`."""
        return TokenView([np.memmap(path, dtype=self._dtype, mode="r") for path in self.shards()])

    def drop(self, count: int, text_bytes: int) -> None:
        """Take back the last count tokens; needs :meth:`close` first."""
        before = self.shards()
        self.tokens -= count
        self.text_bytes -= text_bytes
        for index, path in enumerate(before):
            kept = self.tokens - index * self._shard_tokens
            if kept <= 0:
                path.unlink()
            elif kept < self._shard_tokens:
                os.truncate(path, kept * self._dtype.itemsize)


def move_tail(source: ShardWriter, target: ShardWriter, count: int, tokenizer: Tokenizer) -> None:
    """Move the last count tokens from one split to another; both writers are closed, before and after.

    The bytes of their text are counted by decoding it, which can be a few off: a cut can go through a character.
    """
    view = source.view()
    for start in range(source.tokens - count, source.tokens, _BLOCK):
        block = view.window(start, min(start + _BLOCK, source.tokens))
        target.write(block, len(tokenizer.decode(block.tolist()).encode()))
    target.close()
    del view  # some systems refuse to change a file that is mapped
    source.drop(count, target.text_bytes)
