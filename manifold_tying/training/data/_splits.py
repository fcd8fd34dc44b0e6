"""Which documents are held out, and how far a corpus is read."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from ._tokenizer import Encoded, Piece
from ._writer import ShardWriter

HELD_OUT_EVERY = 20
Limit = tuple[int, int]  # training and held-out tokens after which a stream is not read on
_SAMPLE_CHARACTERS = 64_000_000  # the tokenizer is trained on so much text at most
_PROGRESS_TOKENS = 1_000_000


def held_out(document: int) -> bool:
    """Whether a document, counted from 0, is: every 20th one."""
    return document % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def write_splits(
    encoded: Generator[Encoded],
    train: ShardWriter,
    val: ShardWriter,
    limit: Limit | None,
    report: Callable[[str], None],
) -> int:
    """Write the documents to their splits, up to the one that brings both to their limits; returns their number."""
    documents = reported = 0
    with closing(encoded):
        for part in encoded:
            split = val if held_out(part.document) else train
            split.write(part.tokens, part.text_bytes)
            documents += part.ends_document
            if train.tokens - reported >= _PROGRESS_TOKENS:
                reported = train.tokens
                report(f"{reported / 1e6:.0f} million training tokens")
            if limit and train.tokens >= limit[0] and val.tokens >= limit[1] and part.ends_document:
                break
    return documents


def sample_of(texts: Iterator[Piece]) -> Iterator[Piece]:
    """The first pieces, until they hold so much training text as the tokenizer is trained on."""
    characters = 0
    for piece in texts:
        yield piece
        characters += 0 if held_out(piece.document) else len(piece.text)
        if characters >= _SAMPLE_CHARACTERS:
            return
