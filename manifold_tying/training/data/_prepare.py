"""Corpus to token directory, made once and kept in a cache."""

import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from manifold_tying.training._files import digest
from manifold_tying.training._lock import abandoned, held

from ._corpus import Corpus, open_corpus
from ._splits import HELD_OUT_EVERY, Limit, held_out, sample_of, write_splits
from ._tokenizer import (
    SMALLEST_VOCABULARY,
    encode,
    load_tokenizer,
    pieces,
    serial_calls,
    train_tokenizer,
)
from ._tokens import DTYPES, FORMAT, Meta, open_tokens, sha256, write_meta
from ._writer import ShardWriter, move_tail

SHARD_TOKENS = 100_000_000
_DRAFT = re.compile(r"\.[a-z]+-[0-9a-f]{20}-[0-9a-f]{32}")


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
    progress: Callable[[str], None] | None = None,
) -> Path:
    """The token directory of a corpus, from the cache or newly made.

    A byte-level BPE is trained on the training documents, or on as much of them as comes first; a separator goes after
    every document. Every 20th document is held out. A corpus of fewer than 20 is divided by its tokens instead, and
    the last 5 % are held out (the tokenizer has then seen them).

    A directory is made beside its final place and renamed, so that whatever lies in the cache is whole, also when
    several processes prepare the same corpus at once. Local files that have changed are prepared anew; a dataset on the
    hub is known by its name, configuration and split only: delete its directory to get a newer revision.

    Args:
        spec: which corpus, see ``SPEC_FORMS``
        vocab_size: token ids stay below it; fewer are used where the corpus is too small to fill it
        tokens_needed: training tokens after which to stop reading a streamed corpus (``hf:``); None reads all of it.
            Other corpora are always read to their end
        held_out_needed: held-out tokens that a streamed corpus is read on for, so that they do not depend on how much is
            trained
        tokenizer: path of a ``tokenizer.json`` to use instead of training one
        cache: folder for prepared corpora; None means :func:`cache_directory`
        progress: is called with a line of text now and then

    Raises:
        ValueError: the spec is unknown or names something that does not exist; a document cannot be read; there is too
            little text; vocab_size is too small; a directory in the cache is damaged.
    """
    if tokens_needed is not None and tokens_needed < 1:
        raise ValueError(f"expected tokens_needed to be positive, got {tokens_needed}")
    given = None if tokenizer is None else _read_tokenizer(Path(tokenizer))
    kind, _, rest = spec.partition(":")
    if kind == "tokens":
        return _check_given(Path(rest).expanduser(), vocab_size, given)
    if given is None and vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"expected vocab_size >= {SMALLEST_VOCABULARY}: all bytes and a separator; got {vocab_size}")
    corpus = open_corpus(spec)
    limit = None if tokens_needed is None or not corpus.streamed else (tokens_needed, held_out_needed)
    root = cache_directory() if cache is None else Path(cache)
    final = root / f"{kind}-{_key(corpus, vocab_size, limit, given)[:20]}"
    if not final.exists():
        # Nobody takes a name with a dot and a random part for a prepared corpus, whatever becomes of this process.
        draft = root / f".{final.name}-{uuid.uuid4().hex}"
        draft.mkdir(parents=True)
        try:
            with held(draft), serial_calls():
                _sweep(root)
                _build(draft, corpus, vocab_size, limit, given, str(tokenizer), progress or (lambda line: None))
            _publish(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    open_tokens(final)
    return final


def _read_tokenizer(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"expected tokenizer to be the path of a tokenizer.json, found no file {path}")
    return path.read_bytes()


def _check_given(directory: Path, vocab_size: int, given: bytes | None) -> Path:
    meta = open_tokens(directory).meta
    if meta.vocab_size > vocab_size:
        raise ValueError(f"{directory} has vocab_size {meta.vocab_size}; expected at most {vocab_size}, as asked for")
    if given is not None and sha256(given) != meta.tokenizer_sha256:
        raise ValueError(f"{directory} was made with another tokenizer than the given one; leave out the tokenizer")
    return directory


def _key(corpus: Corpus, vocab_size: int, limit: Limit | None, given: bytes | None) -> str:
    """A hash of everything that determines the tokens."""
    tokenizer = None if given is None else sha256(given)
    return sha256(json.dumps([FORMAT, corpus.identity, vocab_size, limit, tokenizer]).encode())


def _sweep(root: Path) -> None:
    """Delete the drafts of processes that were killed."""
    for draft in root.glob(".*-*"):
        if _DRAFT.fullmatch(draft.name) and draft.is_dir() and abandoned(draft):
            shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, final: Path) -> None:
    try:
        draft.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        # Another process was faster, and has made the same.


def _build(
    directory: Path,
    corpus: Corpus,
    vocab_size: int,
    limit: Limit | None,
    given: bytes | None,
    path: str,
    progress: Callable[[str], None],
) -> None:
    """Fill an empty directory; one pass over the documents. ``path`` is that of the given tokenizer."""
    texts = pieces(corpus.documents())
    if given is None:
        progress(f"{corpus.spec}: training a tokenizer")
        sample = list(sample_of(texts))
        own = train_tokenizer((piece.text for piece in sample if not held_out(piece.document)), vocab_size)
        given, path = own.to_str(pretty=True).encode(), "the tokenizer"
        texts = itertools.chain(sample, texts)
    # Also where it was just trained: what is stored is what encodes.
    tokenizer = load_tokenizer(given, path, vocab_size)
    (directory / "tokenizer.json").write_bytes(given)

    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    train, val = (
        ShardWriter(directory, split, dtype=DTYPES[dtype], shard_tokens=SHARD_TOKENS) for split in ("train", "val")
    )
    with closing(train), closing(val):
        documents = write_splits(
            encode(tokenizer, texts), train, val, limit, lambda line: progress(f"{corpus.spec}: {line}")
        )
    if not documents:
        raise ValueError(f"the corpus {corpus.spec!r} holds no text: every document is empty, or there is none")
    if not val.tokens:
        if train.tokens < HELD_OUT_EVERY:
            raise ValueError(
                f"the corpus {corpus.spec!r} is too short to hold out a part of it: "
                f"expected at least {HELD_OUT_EVERY} tokens, got {train.tokens}; use a longer one"
            )
        move_tail(train, val, train.tokens // HELD_OUT_EVERY, tokenizer)
    meta = Meta(
        corpus=corpus.spec,
        vocab_size=vocab_size,
        dtype=dtype,
        documents=documents,
        train_tokens=train.tokens,
        train_bytes=train.text_bytes,
        val_tokens=val.tokens,
        val_bytes=val.text_bytes,
        shard_tokens=SHARD_TOKENS,
        tokenizer_sha256=sha256(given),
        shards={path.name: digest(path) for path in (*train.shards(), *val.shards())},
    )
    write_meta(directory, meta)
