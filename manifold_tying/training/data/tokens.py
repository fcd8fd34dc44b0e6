"""The content of token directories, and how to open them.

``meta.json`` describes the directory, ``tokenizer.json`` is the tokenizer, ``train.bin`` and ``val.bin`` hold token ids,
little-endian, one after another, with the tokenizer's separator after every document. Nothing in a directory is executed.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from manifold_tying._json import read_object

FORMAT = 2
BEGINNING = 1_000_000  # training tokens in the fingerprint: all of a small corpus, a small part of a large one
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of ``meta.json``; the hashes are those of ``tokenizer.json``, ``train.bin`` and ``val.bin``."""

    corpus: str  # the spec that the tokens were made from
    vocab_size: int  # every token id is below it; the tokenizer may have fewer tokens
    dtype: str  # "uint16" or "uint32"
    documents: int  # in both splits
    train_tokens: int  # including separators
    val_tokens: int
    tokenizer_sha256: str
    train_sha256: str
    val_sha256: str
    format: int = FORMAT


@dataclass(frozen=True)
class TokenData:
    """An open token directory; ``train`` and ``val`` are flat, read-only arrays that stay on disk."""

    directory: Path
    meta: Meta
    train: np.ndarray
    val: np.ndarray


def open_tokens(directory: str | Path) -> TokenData:
    """Open a token directory; its tokens stay on disk and are memory-mapped.

    Raises:
        ValueError: a file is missing or does not match ``meta.json``, a token is outside the vocabulary, or ``meta.json``
            does not describe a token directory in this version's format.
    """
    directory = Path(directory)
    meta = _read_meta(directory / "meta.json")
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer} is missing; {_again(directory)}")
    if sha256(tokenizer.read_bytes()) != meta.tokenizer_sha256:
        raise ValueError(f"{tokenizer} does not have the hash in meta.json; {_again(directory)}")
    train, val = (_open_split(directory, split, meta) for split in ("train", "val"))
    return TokenData(directory, meta, train, val)


def write_meta(directory: Path, meta: Meta) -> None:
    """Write ``meta.json``, the last file of a directory to be written."""
    (directory / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _again(directory: Path) -> str:
    return f"delete {directory} and prepare the data again"


def _read_meta(path: Path) -> Meta:
    if not path.is_file():
        raise ValueError(f"{path} is missing, so {path.parent} is not a token directory; prepare one first")
    raw = read_object(path, _again(path.parent))
    found = raw.get("format")
    if found != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, found {found!r}; {_again(path.parent)}")
    for key in fields(Meta):
        if type(raw.get(key.name)) is not key.type:
            raise ValueError(f"{path}: expected {key.name} to be {key.type}, found {raw.get(key.name)!r}")
    meta = Meta(**{key.name: raw[key.name] for key in fields(Meta)})
    if meta.dtype not in DTYPES:
        raise ValueError(f"{path}: expected dtype to be one of {list(DTYPES)}, found {meta.dtype!r}")
    for name in ("vocab_size", "train_tokens", "val_tokens"):
        if getattr(meta, name) < 1:
            raise ValueError(f"{path}: expected {name} to be positive, found {getattr(meta, name)}")
    return meta


def _open_split(directory: Path, split: str, meta: Meta) -> np.ndarray:
    again = _again(directory)
    path, dtype, tokens = directory / f"{split}.bin", DTYPES[meta.dtype], getattr(meta, f"{split}_tokens")
    if not path.is_file():
        raise ValueError(f"{path} is missing: meta.json says {tokens} {split} tokens; {again}")
    expected, found = tokens * dtype.itemsize, path.stat().st_size
    if found != expected:
        raise ValueError(f"{path}: expected {expected} bytes ({tokens} tokens in {meta.dtype}), found {found}; {again}")
    largest, hashed = _scanned(path, dtype, found, path.stat().st_mtime_ns)
    if hashed != getattr(meta, f"{split}_sha256"):
        raise ValueError(f"{path} does not have the hash in meta.json; {again}")
    if largest >= meta.vocab_size:
        raise ValueError(f"{path}: expected token ids below vocab_size={meta.vocab_size}, found {largest}; {again}")
    return np.memmap(path, dtype=dtype, mode="r")


@functools.lru_cache(maxsize=1024)
def _scanned(path: Path, dtype: np.dtype[Any], size: int, changed: int) -> tuple[int, str]:
    """The largest token of a file and its SHA-256, cached: an ablation opens the same files for every run."""
    largest, digest = 0, hashlib.sha256()
    for block in np.array_split(np.memmap(path, dtype=dtype, mode="r"), -(-size // 2**24)):  # of 16 MB
        digest.update(block.data)
        largest = max(largest, int(block.max()))
    return largest, digest.hexdigest()


def identity_of(tokens: TokenData, evaluated: int) -> dict[str, Any]:
    """Fingerprint of a text: its tokenizer, length, beginning, and the ``evaluated`` held-out tokens.

    Runs with equal ``held_out_sha256``, a hash of tokenizer and tokens, are evaluated on the same text, however long they
    train.
    """
    begins = tokens.train[:BEGINNING].astype("<i8").tobytes()
    held_out = tokens.val[: evaluated + 1].astype("<i8").tobytes()
    return {
        "tokenizer_sha256": tokens.meta.tokenizer_sha256,
        "train_tokens": len(tokens.train),
        "train_sha256": sha256(begins),
        "evaluated_tokens": evaluated,
        "held_out_sha256": sha256(tokens.meta.tokenizer_sha256.encode() + held_out),
    }
