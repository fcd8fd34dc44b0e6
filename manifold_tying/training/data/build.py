"""Prepare a corpus once as a token directory in a cache."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manifold_tying.training.files import digest, exclusive

from .corpus import Corpus, open_corpus
from .tokenize import SMALLEST_VOCABULARY, Piece, encode, load_tokenizer, pieces, train_tokenizer
from .tokens import DTYPES, FORMAT, Meta, open_tokens, sha256, write_meta

HELD_OUT_EVERY = 20
Progress = Callable[[str], None]  # receives messages
Limit = tuple[int, int]  # training and held-out tokens after which to stop reading a stream
_SAMPLE_CHARACTERS = 64_000_000  # most text that the tokenizer is trained on
_PROGRESS_TOKENS = 1_000_000


def cache_directory() -> Path:
    """$MANIFOLD_TYING_CACHE, or $XDG_CACHE_HOME/manifold-tying, or ~/.cache/manifold-tying."""
    if own := os.environ.get("MANIFOLD_TYING_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "manifold-tying"


def prepare(
    spec: str,
    *,
    vocab_size: int,
    tokens_needed: int | None = None,
    held_out_needed: int = 0,
    tokenizer: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the token directory of a corpus from the cache; prepare it if it is missing.

    A byte-level BPE is trained on the training documents (at most the first 64 million characters). A separator follows
    every document. Every 20th document is held out. In a corpus of fewer than 20 documents, the last 5 % of the tokens are
    held out instead; the tokenizer has then seen them.

    A directory is renamed into the cache when it is complete. If several processes prepare the same corpus, one works and
    the others wait. Local files that have changed are prepared again. A dataset on the hub is identified only by its name,
    configuration and split: delete its directory to get a newer revision.

    Args:
        spec: the corpus, see ``SPEC_FORMS``
        vocab_size: token ids stay below it; a small corpus may use fewer
        tokens_needed: training tokens after which to stop reading a streamed corpus (``hf:``); None reads all of it.
            Other corpora are always read to their end
        held_out_needed: continue reading a stream until it has this many held-out tokens, so that they do not depend on
            the length of training
        tokenizer: path of a ``tokenizer.json`` to use instead of training one
        cache: folder for prepared corpora; None means :func:`cache_directory`
        progress: receives messages

    Raises:
        ValueError: the spec is unknown or names something that does not exist; a document cannot be read; there is too
            little text; vocab_size is too small; a directory in the cache is damaged.
    """
    if tokens_needed is not None and tokens_needed < 1:
        raise ValueError(f"expected tokens_needed to be positive, got {tokens_needed}")
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise ValueError(f"expected tokenizer to be the path of a tokenizer.json, found no file {tokenizer}")
    given = None if tokenizer is None else Path(tokenizer).read_bytes()
    kind, _, rest = spec.partition(":")
    if kind == "tokens":
        return _check_given(Path(rest).expanduser(), vocab_size, given)
    if given is None and vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"expected vocab_size >= {SMALLEST_VOCABULARY}: all bytes and a separator; got {vocab_size}")
    corpus = open_corpus(spec)
    limit = None if tokens_needed is None or not corpus.streamed else (tokens_needed, held_out_needed)

    def say(line: str) -> None:
        if progress:
            progress(f"{spec}: {line}")

    root = cache_directory() if cache is None else Path(cache)
    tokens_of = [FORMAT, corpus.identity, vocab_size, limit, None if given is None else sha256(given)]
    final = root / f"{kind}-{sha256(json.dumps(tokens_of).encode())[:20]}"
    if not final.exists():
        root.mkdir(parents=True, exist_ok=True)
        draft = root / f".{final.name}"  # never taken for a corpus, even if this process is killed
        with exclusive(draft.with_suffix(".lock")):
            if not final.exists():
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                try:
                    _build(draft, corpus, vocab_size, limit, given, str(tokenizer), say)
                    draft.rename(final)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    open_tokens(final)
    return final


def _check_given(directory: Path, vocab_size: int, given: bytes | None) -> Path:
    meta = open_tokens(directory).meta
    if meta.vocab_size > vocab_size:
        raise ValueError(f"{directory} has vocab_size {meta.vocab_size}; expected at most {vocab_size}, as requested")
    if given is not None and sha256(given) != meta.tokenizer_sha256:
        raise ValueError(f"{directory} was made with another tokenizer than the given one; leave tokenizer out")
    return directory


def _build(
    directory: Path, corpus: Corpus, vocab_size: int, limit: Limit | None, given: bytes | None, path: str, say: Progress
) -> None:
    """Fill an empty directory in one pass over the documents; ``path`` names the given tokenizer in errors."""
    texts = pieces(corpus.documents())
    if given is None:
        say("training a tokenizer")
        sample = list(_sample_of(texts))
        own = train_tokenizer((piece.text for piece in sample if not _held_out(piece.document)), vocab_size)
        given, path = own.to_str(pretty=True).encode(), "the tokenizer"
        texts = itertools.chain(sample, texts)
    # Also if it was just trained, so that the stored tokenizer does the encoding.
    tokenizer = load_tokenizer(given, path, vocab_size)
    (directory / "tokenizer.json").write_bytes(given)

    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    counts = _write_splits(directory, encode(tokenizer, texts), DTYPES[dtype], limit, say)
    if corpus.skipped:
        count = f"{len(corpus.skipped)} file{'s' if len(corpus.skipped) > 1 else ''}"
        say(f"skipped {count} not in UTF-8, such as {corpus.skipped[0]}")
    if not counts["documents"]:
        raise ValueError(f"the corpus {corpus.spec!r} holds no text: no documents, or all are empty or not UTF-8")
    if not counts["val_tokens"]:
        if counts["train_tokens"] < HELD_OUT_EVERY:
            raise ValueError(
                f"the corpus {corpus.spec!r} is too short to hold out a part of it: "
                f"expected at least {HELD_OUT_EVERY} tokens, got {counts['train_tokens']}; use a longer one"
            )
        _move_tail(directory, counts, DTYPES[dtype])
    found: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype, "tokenizer_sha256": sha256(given), **counts}
    found |= {f"{split}_sha256": digest(directory / f"{split}.bin") for split in ("train", "val")}
    write_meta(directory, Meta(corpus=corpus.spec, **found))


def _held_out(document: int) -> bool:
    """Whether a document, counted from 0, is held out; every 20th is."""
    return document % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _sample_of(texts: Iterator[Piece]) -> Iterator[Piece]:
    """The first pieces, until they hold _SAMPLE_CHARACTERS of training text."""
    characters = 0
    for piece in texts:
        yield piece
        characters += 0 if _held_out(piece.document) else len(piece.text)
        if characters >= _SAMPLE_CHARACTERS:
            return


def _write_splits(
    directory: Path,
    encoded: Iterator[tuple[Piece, np.ndarray]],
    dtype: np.dtype[Any],
    limit: Limit | None,
    say: Progress,
) -> dict[str, int]:
    """Write documents to their splits until both have reached their limits; returns the numbers of documents and tokens."""
    counts = dict.fromkeys(("documents", "train_tokens", "val_tokens"), 0)
    reported = 0
    with open(directory / "train.bin", "wb") as train, open(directory / "val.bin", "wb") as val:
        for piece, tokens in encoded:
            split, file = ("val", val) if _held_out(piece.document) else ("train", train)
            file.write(tokens.astype(dtype).tobytes())
            counts[f"{split}_tokens"] += len(tokens)
            counts["documents"] += piece.ends_document
            if counts["train_tokens"] - reported >= _PROGRESS_TOKENS:
                reported = counts["train_tokens"]
                say(f"{reported / 1e6:.0f} million training tokens")
            enough = limit and counts["train_tokens"] >= limit[0] and counts["val_tokens"] >= limit[1]
            if enough and piece.ends_document:
                break
    return counts


def _move_tail(directory: Path, counts: dict[str, int], dtype: np.dtype[Any]) -> None:
    """Hold out the last twentieth of the training tokens of a corpus with few documents."""
    train, count = directory / "train.bin", counts["train_tokens"] // HELD_OUT_EVERY
    kept = counts["train_tokens"] - count
    (directory / "val.bin").write_bytes(np.fromfile(train, dtype, offset=kept * dtype.itemsize).tobytes())
    os.truncate(train, kept * dtype.itemsize)
    counts |= {"train_tokens": kept, "val_tokens": count}
