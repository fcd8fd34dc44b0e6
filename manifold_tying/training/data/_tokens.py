"""Token directories: what lies in them, and reading them.

``meta.json`` describes the directory, ``tokenizer.json`` is the tokenizer, ``train-00000.bin``, ... and
``val-00000.bin``, ... hold token ids, little-endian, one after another, with the tokenizer's separator after every
document. Every shard of a split but its last one holds ``shard_tokens`` tokens. Nothing in a directory is executed.
"""

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from manifold_tying._json import read_object

FORMAT = 1
_BLOCK = 1 << 24  # bytes of a shard that are looked at at once
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What ``meta.json`` holds.

    Attributes:
        corpus: the spec that the tokens were made from
        vocab_size: every token id is below it; the tokenizer may have fewer tokens
        dtype: "uint16" or "uint32"
        documents: number of documents in both splits together
        train_tokens, val_tokens: tokens per split, separators included
        train_bytes, val_bytes: bytes of UTF-8 text per split, without separators. Where a document is divided between
            the splits, those of val are counted by decoding and may be a few off
        shard_tokens: tokens in every shard of a split but the last
        tokenizer_sha256: of the bytes of ``tokenizer.json``
        shards: SHA-256 of each shard by its name; empty where an earlier version wrote the directory
    """

    corpus: str
    vocab_size: int
    dtype: str
    documents: int
    train_tokens: int
    train_bytes: int
    val_tokens: int
    val_bytes: int
    shard_tokens: int
    tokenizer_sha256: str
    format: int = FORMAT
    shards: dict[str, str] = field(default_factory=dict)


class TokenView:
    """The tokens of one split: a flat, read-only sequence over its shards."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = list(shards)
        self._ends = list(itertools.accumulate(len(shard) for shard in shards))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, start: int, stop: int) -> np.ndarray:
        """Tokens start, ..., stop - 1 as a new int64 array (stop - start,); IndexError outside 0 ... len(self)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"expected 0 <= start <= stop <= {len(self)}, got {start} and {stop}")
        window = np.empty(stop - start, dtype=np.int64)
        filled = 0
        shard = bisect.bisect_right(self._ends, start)
        while filled < len(window):
            offset = start + filled - (self._ends[shard] - len(self._shards[shard]))
            part = self._shards[shard][offset : offset + len(window) - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return window


@dataclass(frozen=True)
class TokenData:
    """An open token directory."""

    directory: Path
    meta: Meta
    train: TokenView
    val: TokenView

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of held-out text per token; a loss in nats over this and ln 2 is in bits per byte."""
        return self.meta.val_bytes / self.meta.val_tokens

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))


def open_tokens(directory: str | Path) -> TokenData:
    """Open a token directory; its tokens stay on disk and are memory-mapped.

    Raises:
        ValueError: a file is missing, has another size or content than ``meta.json`` says, holds a token beyond the
            vocabulary, or ``meta.json`` is no description of a token directory in this version's format.
    """
    directory = Path(directory)
    meta = _read_meta(directory / "meta.json")
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer} is missing; {_again(directory)}")
    if sha256(tokenizer.read_bytes()) != meta.tokenizer_sha256:
        raise ValueError(f"{tokenizer} is not the tokenizer that meta.json names by its hash; {_again(directory)}")
    train, val = (_open_split(directory, split, meta) for split in ("train", "val"))
    return TokenData(directory, meta, train, val)


def write_meta(directory: Path, meta: Meta) -> None:
    """Write ``meta.json``, the last file of a directory to be written."""
    (directory / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")


def shard_path(directory: Path, split: str, index: int) -> Path:
    """Where the shard with this index, from 0, lies."""
    return directory / f"{split}-{index:05d}.bin"


def sha256(content: bytes) -> str:
    """The hash in hexadecimal digits."""
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
    raw.setdefault("shards", {})
    for key in fields(Meta):
        kind = dict if key.name == "shards" else key.type
        if type(raw.get(key.name)) is not kind:
            raise ValueError(f"{path}: expected {key.name} to be {kind}, found {raw.get(key.name)!r}")
    meta = Meta(**{key.name: raw[key.name] for key in fields(Meta)})
    if meta.dtype not in DTYPES:
        raise ValueError(f"{path}: expected dtype to be one of {list(DTYPES)}, found {meta.dtype!r}")
    for name in ("vocab_size", "train_tokens", "val_tokens", "shard_tokens"):
        if getattr(meta, name) < 1:
            raise ValueError(f"{path}: expected {name} to be positive, found {getattr(meta, name)}")
    return meta


def _open_split(directory: Path, split: str, meta: Meta) -> TokenView:
    dtype = DTYPES[meta.dtype]
    total = getattr(meta, f"{split}_tokens")
    shards = []
    for index in range(-(-total // meta.shard_tokens)):
        path = shard_path(directory, split, index)
        tokens = min(meta.shard_tokens, total - index * meta.shard_tokens)
        if not path.is_file():
            raise ValueError(f"{path} is missing: meta.json says {total} {split} tokens; {_again(directory)}")
        expected, found = tokens * dtype.itemsize, path.stat().st_size
        if found != expected:
            raise ValueError(
                f"{path}: expected {expected} bytes ({tokens} tokens in {meta.dtype}), found {found}; "
                f"{_again(directory)}"
            )
        largest, found_digest = _scanned(path, dtype, found, path.stat().st_mtime_ns)
        if meta.shards and meta.shards.get(path.name) != found_digest:
            raise ValueError(f"{path} is not the shard that meta.json names by its hash; {_again(directory)}")
        if largest >= meta.vocab_size:
            raise ValueError(
                f"{path}: expected token ids below vocab_size={meta.vocab_size}, found {largest}; {_again(directory)}"
            )
        shards.append(np.memmap(path, dtype=dtype, mode="r"))
    return TokenView(shards)


@functools.lru_cache(maxsize=1024)
def _scanned(path: Path, dtype: np.dtype[Any], size: int, changed: int) -> tuple[int, str]:
    """The largest token of a shard, and its SHA-256. An ablation opens the same shards for every run."""
    largest, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype).max()))
    return largest, digest.hexdigest()
