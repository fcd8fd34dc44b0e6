"""Byte-level BPE: train or load a tokenizer, and encode documents on all cores."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
# End-of-document tokens of published tokenizers: GPT-2 and Qwen, Llama 3, Llama 2 and T5, Gemma.
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCABULARY = 256 + 1  # every byte, and the separator
_PIECE_CHARACTERS = 1 << 18
# A piece for each core, but not for more than 16: encoding takes hundreds of bytes per character.
_CHUNK_CHARACTERS = min(os.cpu_count() or 1, 16) * _PIECE_CHARACTERS
# Training takes quadratic time in a word's length. No word of prose or code is this long; a line of base64 or DNA may be.
_LONGEST_WORD = 1024
_LONG = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}|\s{{{_LONGEST_WORD + 1},}}")


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    document: int
    ends_document: bool


def pieces(documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
    """Number the nonempty documents from 0 and cut long ones, after a line if possible.

    Encoding takes hundreds of bytes per character, so a book of a gigabyte cannot be encoded at once. The cuts do not
    depend on the parts in which a document arrives.
    """
    document = 0
    for parts in documents:
        text, start = "", 0
        for part in parts:
            text, start = text[start:] + part, 0
            while len(text) - start > _PIECE_CHARACTERS:
                stop = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
                yield Piece(text[start:stop], document, False)
                start = stop
        if text:
            yield Piece(text[start:], document, True)
            document += 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most vocab_size (>= SMALLEST_VOCABULARY) tokens; equal texts give equal tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # in a small corpus, pairs seen once would fill the vocabulary
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _short_words(text)), trainer)
    return tokenizer


def _short_words(text: str) -> Iterator[str]:
    """Cut the text inside words that are too long to train on."""
    start = 0
    for found in _LONG.finditer(text):
        for stop in range(found.start() + _LONGEST_WORD, found.end(), _LONGEST_WORD):
            yield text[start:stop]
            start = stop
    yield text[start:]


def load_tokenizer(content: bytes, where: str, vocab_size: int) -> Tokenizer:
    """Load the content of a ``tokenizer.json``; ValueError if it has ids beyond vocab_size or no end-of-document token."""
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{where} is not a tokenizer.json of the tokenizers library: {error}") from error
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > vocab_size:
        raise ValueError(f"{where} has {size} tokens; expected vocab_size to be at least that, got {vocab_size}")
    separator_id(tokenizer, where)
    return tokenizer


def separator_id(tokenizer: Tokenizer, where: str) -> int:
    """The id of the end-of-document token; raises ValueError if the tokenizer has none."""
    if found := [identifier for name in _SEPARATORS if (identifier := tokenizer.token_to_id(name)) is not None]:
        return found[0]
    raise ValueError(f"{where} has none of {', '.join(_SEPARATORS)}; add one of them to separate documents")


def encode(tokenizer: Tokenizer, texts: Iterable[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Encode pieces, on all cores, and yield them in order, with their tokens and a separator where a document ends.

    A separator that is spelled out in a text is encoded as text: it cannot end a document.
    """
    separator = separator_id(tokenizer, "the tokenizer")
    tokenizer.encode_special_tokens = True
    # A published tokenizer.json may enable both.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    for chunk in _chunks(texts):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in chunk], add_special_tokens=False)
        for piece, encoding in zip(chunk, encodings, strict=True):
            yield piece, np.array([*encoding.ids, separator] if piece.ends_document else encoding.ids, dtype=np.uint32)


def _chunks(texts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces with about _CHUNK_CHARACTERS characters, which tokenizers encodes in parallel."""
    chunk: list[Piece] = []
    characters = 0
    for piece in texts:
        chunk.append(piece)
        characters += len(piece.text)
        if characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
