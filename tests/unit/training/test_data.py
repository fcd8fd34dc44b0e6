"""Corpora to token directories, token directories to batches."""

import json
import os
import random
import sys
import sysconfig
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hostile import in_time
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from manifold_tying.training.data import (
    Batches,
    TokenData,
    build,
    cache_directory,
    corpus,
    open_tokens,
    prepare,
    tokenize,
    validation_batches,
)
from manifold_tying.training.data.corpus import open_corpus

SEPARATOR = "<|endoftext|>"
VOCABULARY = 400


def make_documents(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["manifold", "tying", "Ω≈ç√", "日本語", "🙂", "\n", "\n\n    return", "x_1", "  ", "\t", "\r\n", "don't"]
    return [f"{i}: " + " ".join(draw.choices(words, k=draw.randrange(20, 80))) for i in range(count)]


DOCUMENTS = make_documents(45)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test prepares into a cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MANIFOLD_TYING_CACHE", str(folder))
    return folder


@pytest.fixture
def no_shared_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 7, "text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def write_parquet(path: Path, documents: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"id": [7] * len(documents), column: documents}), path)
    return path


def text_folder(root: Path, documents: list[str]) -> str:
    for i, text in enumerate(documents):
        path = root / f"{i // 10}" / f"{i:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    # None of these is a document: not UTF-8, hidden, hidden folder, empty.
    (root / "0" / "005x.bin").write_bytes(b"\xff\xfe\x00")
    (root / "cut.txt").write_bytes(b"ends in half a character \xe6\x97")
    (root / ".hidden.txt").write_text("hidden")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    (root / "empty.txt").write_text("")
    return f"text:{root}"


def text_files(root: Path, documents: list[str]) -> str:
    text_folder(root, documents)
    return "text:" + ",".join(str(root / f"{i // 10}" / f"{i:03d}.txt") for i in range(len(documents)))


def jsonl_folder(root: Path, documents: list[str]) -> str:
    write_jsonl(root / "b.jsonl", documents[20:])
    path = write_jsonl(root / "a.jsonl", documents[:20])
    path.write_text('{"text": null}\n\n' + path.read_text(encoding="utf-8"), encoding="utf-8")
    (root / "README.md").write_text("not a document")
    return f"jsonl:{root}"


def parquet_file(root: Path, documents: list[str]) -> str:
    return f"parquet:{write_parquet(root / 'corpus.parquet', documents)}"


def hub_jsonl(root: Path, documents: list[str]) -> str:
    for part in (2, 0, 1):
        write_jsonl(root / f"part-{part}.jsonl", documents[part * 15 : (part + 1) * 15])
    return f"hf:{root}"


def hub_parquet(root: Path, documents: list[str]) -> str:
    write_parquet(root / "train-0.parquet", documents)
    return f"hf:{root}:default:train"


FORMS = (text_folder, text_files, jsonl_folder, parquet_file, hub_jsonl, hub_parquet)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def joined(documents: list[str]) -> str:
    return "".join(text + SEPARATOR for text in documents)


def text_bytes(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def tokenizer_of(data: TokenData) -> Tokenizer:
    return Tokenizer.from_file(str(data.directory / "tokenizer.json"))


def jsonl_corpus(root: Path, count: int = 45) -> str:
    return f"jsonl:{write_jsonl(root / f'{count}.jsonl', make_documents(count))}"


# Corpora


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.usefixtures("no_shared_hub_cache")
def test_tokens_decode_to_the_documents(
    form: Callable[[Path, list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_BLOCK", 7)  # a file is read in blocks, which end within characters
    data = open_tokens(prepare(form(tmp_path / "corpus", DOCUMENTS), vocab_size=VOCABULARY))
    train = [text for i, text in enumerate(DOCUMENTS) if i not in (19, 39)]
    val = [DOCUMENTS[19], DOCUMENTS[39]]
    for view, documents in ((data.train, train), (data.val, val)):
        assert tokenizer_of(data).decode(view.tolist(), skip_special_tokens=False) == joined(documents)
    assert data.meta.documents == 45
    assert max(data.train.tolist()) < VOCABULARY == data.meta.vocab_size
    # The tokenizer has learned something: fewer tokens than bytes.
    assert len(data.train) < 0.8 * text_bytes(train)


def test_files_of_a_folder_that_are_no_text_are_counted(tmp_path: Path) -> None:
    said: list[str] = []
    prepare(spec := text_folder(tmp_path, DOCUMENTS), vocab_size=VOCABULARY, progress=said.append)
    assert f"{spec}: skipped 2 files not in UTF-8, such as {tmp_path}/0/005x.bin" in said


def test_stdlib_is_the_library_without_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"abc.py": "first = 1\n", "email/a.py": "second = 2\n", "zipfile.py": "third = 3\n" * 30}
    left = ["site-packages/p.py", "dist-packages/p.py", "test/t.py", "email/tests/t.py", "idlelib/i.py", "a.txt"]
    for name, text in (kept | dict.fromkeys(left, "never")).items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "lib" / "bad.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    data = open_tokens(prepare("stdlib", vocab_size=VOCABULARY))
    text = tokenizer_of(data).decode(data.train.tolist() + data.val.tolist(), skip_special_tokens=False)
    assert text == joined(list(kept.values()))


def test_a_folder_with_a_fifo_and_a_link_to_nothing_is_read(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer for ever."""
    text_folder(tmp_path, DOCUMENTS)
    os.mkfifo(tmp_path / "0" / "000.txt.fifo")
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "0" / "nothing.txt").symlink_to(tmp_path / "missing")
    with in_time():
        documents = ["".join(parts) for parts in open_corpus(f"text:{tmp_path}").documents()]
        with pytest.raises(ValueError, match="no file or folder"):
            open_corpus(f"text:{tmp_path / 'fifo.jsonl'}")
    assert list(filter(None, documents)) == DOCUMENTS


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    """Its text could otherwise be held out and trained on."""
    spec = text_files(tmp_path, DOCUMENTS)
    (tmp_path / "0/link.txt").symlink_to(tmp_path / "1/010.txt")
    documents = ["".join(parts) for parts in open_corpus(f"{spec},{tmp_path / '0'},{tmp_path / '1'}").documents()]
    assert sorted(filter(None, documents)) == sorted(DOCUMENTS)


def test_a_subfolder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_folder(tmp_path, DOCUMENTS)
    scandir = os.scandir

    def refuse(path: str) -> object:  # root, which tests may run as, is never refused
        if str(path).endswith("/2"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match=f"Permission denied: '{tmp_path}/2'"):
        open_corpus(f"text:{tmp_path}")


def test_the_memory_of_a_large_file_is_bounded(tmp_path: Path) -> None:
    """Of its reading: no more than a few blocks are held, however long the file is."""
    (tmp_path / "large.txt").write_text("one line of a large file\n" * 1_000_000)  # 25 MB
    tracemalloc.start()
    characters = sum(len(p.text) for p in tokenize.pieces(open_corpus(f"text:{tmp_path}").documents()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert characters == 25_000_000 and peak < 10_000_000


def test_long_runs_of_letters_train_a_tokenizer_in_time() -> None:
    """As one word, 262,144 letters took 44 seconds."""
    draw = random.Random(0)
    letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=1 << 16))
    parts = list(tokenize._short_words(f"before {letters} after"))
    assert "".join(parts) == f"before {letters} after" and max(map(len, parts)) <= 7 + 1024
    tokenizer = tokenize.train_tokenizer([letters], 300)
    assert tokenizer.decode(tokenizer.encode(letters[:500]).ids) == letters[:500]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    text = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(1)
    pages = slice(text.dictionary_page_offset, text.dictionary_page_offset + text.total_compressed_size)
    whole = path.read_bytes()
    for byte in (b"\x00", b"\xff"):
        path.write_bytes(whole[: pages.start] + byte * (pages.stop - pages.start) + whole[pages.stop :])
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            list(open_corpus(f"parquet:{path}").documents())


def test_docstrings_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package_of_this_test"
    (package / "tests").mkdir(parents=True)
    prose = " ".join(8 * ["What this is for, in so many words."])
    (package / "__init__.py").write_text(f'"""{prose}"""\n\ndef f():\n    """Of f."""\n    x = "\\d"\n')
    (package / "short.py").write_text('"""Too little."""\n')
    (package / "broken.py").write_text(f'"""{prose}"""\nprint "2"\n')
    (package / "tests/t.py").write_text(f'"""{prose}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert ["".join(parts) for parts in open_corpus(f"docstrings:{package.name}").documents()] == [f"{prose}\n\nOf f."]
    assert package.name not in sys.modules


def test_the_tokenizer_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    documents = ["abcabc " * 30] * 19 + ["xyzxyz " * 30]
    data = open_tokens(prepare(f"jsonl:{write_jsonl(tmp_path / 'c.jsonl', documents)}", vocab_size=VOCABULARY))
    assert "abcabc" in tokenizer_of(data).get_vocab() and "xy" not in tokenizer_of(data).get_vocab()


@pytest.mark.parametrize("count", [1, 19])
def test_few_documents_are_divided_by_tokens(count: int, tmp_path: Path) -> None:
    documents = make_documents(count)
    data = open_tokens(prepare(jsonl_corpus(tmp_path, count), vocab_size=VOCABULARY))
    tokens = data.train.tolist() + data.val.tolist()
    assert tokenizer_of(data).decode(tokens, skip_special_tokens=False) == joined(documents)
    assert len(data.val) == len(tokens) // 20 > 0


def test_a_separator_in_a_text_is_text(tmp_path: Path) -> None:
    documents = [f"before {SEPARATOR} after {i}" for i in range(20)]
    data = open_tokens(prepare(f"jsonl:{write_jsonl(tmp_path / 'c.jsonl', documents)}", vocab_size=VOCABULARY))
    separator = tokenizer_of(data).token_to_id(SEPARATOR)
    assert [i for i, token in enumerate(data.val.tolist(), 1) if token == separator] == [len(data.val)]
    assert tokenizer_of(data).decode(data.val.tolist()) == documents[19]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    small, large = (open_tokens(prepare(jsonl_corpus(tmp_path), vocab_size=(1 << 16) + more)) for more in (0, 1))
    assert (small.meta.dtype, large.meta.dtype) == ("uint16", "uint32")
    assert small.train.tolist() == large.train.tolist()
    assert (large.directory / "train.bin").stat().st_size == 4 * len(large.train)


def bad_corpora(root: Path) -> list[tuple[str, str]]:
    """Spec and the words that the error must have."""
    (root / "empty").mkdir(parents=True)
    (root / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (root / "number.jsonl").write_text('{"text": 1}\n')
    (root / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "short.txt").write_text("ab cd")
    (root / "bad.parquet").write_text("PAR0")
    write_jsonl(root / "hub" / "a.jsonl", DOCUMENTS)
    (root / "nocolumn").mkdir()
    (root / "nocolumn" / "a.jsonl").write_text('{"content": "a"}\n')
    write_parquet(root / "content.parquet", ["a"], column="content")
    return [
        ("csv:a", "tokens:DIR"),
        ("stdlib:3.11", "the forms are"),  # it takes nothing
        ("docstrings:no_such_package", "name of an installed package, got 'no_such_package'"),
        (f"text:{root / 'missing.txt'}", "no file or folder .*missing.txt"),
        (f"text:{root / 'empty'}", "holds no text"),
        (f"text:{root / 'latin.txt'}", "latin.txt is not UTF-8"),
        (f"text:{root / 'short.txt'}", "too short to hold out"),
        (f"jsonl:{root / 'bad.jsonl'}", "line 2 is not JSON"),
        (f"jsonl:{root / 'number.jsonl'}", "expected a string as the text, got int"),
        (f"jsonl:{root / 'surrogate.jsonl'}", "line 1: the text is not valid Unicode"),
        (f"parquet:{root / 'bad.parquet'}", "bad.parquet is damaged, or not a parquet file"),
        (f"parquet:{root / 'content.parquet'}", "no column \"text\"; it has .*'content'"),
        ("hf:", "expected hf:NAME"),
        (f"hf:{root / 'nothing'}", "cannot open the dataset"),
        (f"hf:{root / 'hub'}::test", "Bad split: test"),
        (f"hf:{root / 'nocolumn'}", 'no column "text"'),
    ]


@pytest.mark.usefixtures("no_shared_hub_cache")
def test_bad_corpora_say_what_is_wrong_and_leave_nothing(tmp_path: Path, cache: Path) -> None:
    for spec, message in bad_corpora(tmp_path / "bad"):
        with pytest.raises(ValueError, match=message):
            prepare(spec, vocab_size=VOCABULARY)
        assert not cache.exists() or not visible(cache), spec


def test_bad_sizes_are_refused_before_anything_is_read(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size >= 257.*got 256"):
        prepare(jsonl_corpus(tmp_path), vocab_size=256)
    with pytest.raises(ValueError, match="tokens_needed to be positive, got 0"):
        prepare(jsonl_corpus(tmp_path), vocab_size=257, tokens_needed=0)
    assert not cache.exists()
    # Room for the bytes and the separator only: no merges, and still every text can be encoded.
    data = open_tokens(prepare(jsonl_corpus(tmp_path), vocab_size=257))
    assert len(data.val) == text_bytes([make_documents(45)[i] for i in (19, 39)]) + 2


# Streaming


@pytest.mark.usefixtures("no_shared_hub_cache")
def test_streaming_stops_at_the_document_that_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_PIECE_CHARACTERS", 100)  # how work is divided must not matter
    spec = hub_jsonl(tmp_path / "corpus", DOCUMENTS)
    complete = open_tokens(prepare(spec, vocab_size=VOCABULARY))
    needed = len(complete.train) // 2
    data = open_tokens(prepare(spec, vocab_size=VOCABULARY, tokens_needed=needed))
    train = [text for i, text in enumerate(DOCUMENTS[: data.meta.documents]) if i != 19]
    assert 20 < data.meta.documents < 39
    assert tokenizer_of(data).decode(data.train.tolist(), skip_special_tokens=False) == joined(train)
    separators = [i for i, token in enumerate(data.train.tolist(), 1) if token == 0]
    assert separators[-2] < needed <= separators[-1] == len(data.train)
    # Only a stream is cut.
    local = jsonl_corpus(tmp_path)
    assert prepare(local, vocab_size=VOCABULARY, tokens_needed=10) == prepare(local, vocab_size=VOCABULARY)
    # More than there is: all there is.
    much = prepare(spec, vocab_size=VOCABULARY, tokens_needed=10**9)
    assert open_tokens(much).train.tolist() == complete.train.tolist()


# A tokenizer of the user's own


def foreign_tokenizer(path: Path, separator: str = "</s>") -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", separator], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=2000)
    tokenizer.save(str(path))
    return path


def test_a_given_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    path = foreign_tokenizer(tmp_path / "tokenizer.json")
    data = open_tokens(prepare(jsonl_corpus(tmp_path), vocab_size=300, tokenizer=path))
    assert (data.directory / "tokenizer.json").read_bytes() == path.read_bytes()
    # Neither its truncation nor its padding has touched the documents.
    text = tokenizer_of(data).decode(data.val.tolist(), skip_special_tokens=False)
    assert text == f"{DOCUMENTS[19]}</s>{DOCUMENTS[39]}</s>"


def test_a_given_tokenizer_must_fit(tmp_path: Path) -> None:
    spec, path = jsonl_corpus(tmp_path), foreign_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="has 300 tokens; expected vocab_size to be at least that, got 299"):
        prepare(spec, vocab_size=299, tokenizer=path)
    with pytest.raises(ValueError, match="has none of"):
        prepare(spec, vocab_size=300, tokenizer=foreign_tokenizer(tmp_path / "other.json", separator="<end>"))
    with pytest.raises(ValueError, match=r"found no file .*missing\.json"):
        prepare(spec, vocab_size=300, tokenizer=tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        prepare(spec, vocab_size=300, tokenizer=tmp_path / "bad.json")


# The cache


def test_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("MANIFOLD_TYING_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "manifold-tying"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "manifold-tying"


def test_the_second_time_nothing_is_built(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = jsonl_corpus(tmp_path)
    lines: list[str] = []
    first = prepare(spec, vocab_size=VOCABULARY, progress=lines.append)
    assert first.parent == cache and lines and "training a tokenizer" in lines[0]
    monkeypatch.setattr(build, "_build", lambda *args: pytest.fail("built again"))
    assert prepare(spec, vocab_size=VOCABULARY) == first
    assert visible(cache) == [first]


@pytest.mark.usefixtures("no_shared_hub_cache")
def test_every_ingredient_counts(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    hub_jsonl(folder, DOCUMENTS)
    jsonl, hub = f"jsonl:{folder}", f"hf:{folder}"
    seen = {
        prepare(jsonl, vocab_size=300),
        prepare(jsonl, vocab_size=301),
        prepare(jsonl, vocab_size=301, tokenizer=foreign_tokenizer(tmp_path / "a.json")),
        prepare(jsonl, vocab_size=301, tokenizer=foreign_tokenizer(tmp_path / "b.json", "<eos>")),
        prepare(f"text:{folder}", vocab_size=300),
        prepare(hub, vocab_size=300),
        prepare(hub, vocab_size=300, tokens_needed=100),
        prepare(hub, vocab_size=300, tokens_needed=101),
        prepare(f"{hub}::train", vocab_size=300),  # the same split as by default
    }
    assert len(seen) == 8
    for count, change in (
        (10, lambda: write_jsonl(folder / "part-1.jsonl", make_documents(14))),  # a shorter file
        (12, lambda: os.utime(folder / "part-1.jsonl", (1, 1))),  # of the same length, changed at another time
        (14, lambda: write_jsonl(folder / "part-3.jsonl", make_documents(3))),  # one more
    ):
        change()
        seen |= {prepare(jsonl, vocab_size=300), prepare(hub, vocab_size=300)}
        assert len(seen) == count


@pytest.mark.parametrize("place", ["encode", "_move_tail", "write_meta"])
def test_a_failed_build_leaves_nothing(
    place: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt("in the middle")

    spec = jsonl_corpus(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(build, place, fail)
        with pytest.raises(KeyboardInterrupt, match="in the middle"):
            prepare(spec, vocab_size=VOCABULARY)
    assert all(path.suffix == ".lock" for path in cache.iterdir())
    assert open_tokens(prepare(spec, vocab_size=VOCABULARY)).meta.documents == 3


def test_of_two_processes_one_builds_and_the_other_waits(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, once, started = jsonl_corpus(tmp_path), build._build, []

    def slowly(*args: Any) -> None:
        started.append(args[0])
        time.sleep(0.3)
        once(*args)

    monkeypatch.setattr(build, "_build", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare(spec, vocab_size=400), range(2))
    assert first == second and len(started) == 1
    again = prepare(spec, vocab_size=400, cache=tmp_path / "again")
    names = ["meta.json", "tokenizer.json", "train.bin", "val.bin"]
    assert sorted(path.name for path in first.iterdir()) == names
    assert [(again / name).read_bytes() for name in names] == [(first / name).read_bytes() for name in names]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path, cache: Path) -> None:
    spec = jsonl_corpus(tmp_path)
    final = prepare(spec, vocab_size=VOCABULARY)
    draft = final.rename(cache / f".{final.name}")
    (draft / "train.bin").write_bytes(b"half")
    assert open_tokens(prepare(spec, vocab_size=VOCABULARY)).meta.documents == 45
    assert not draft.exists()


# Token directories


def test_a_token_directory_is_a_corpus(tmp_path: Path, cache: Path) -> None:
    directory = prepare(jsonl_corpus(tmp_path), vocab_size=300)
    given = directory.rename(tmp_path / "moved")
    assert prepare(f"tokens:{given}", vocab_size=300) == given
    assert prepare(f"tokens:{given}", vocab_size=500, tokenizer=given / "tokenizer.json") == given
    assert visible(cache) == []
    with pytest.raises(ValueError, match="has vocab_size 300; expected at most 299"):
        prepare(f"tokens:{given}", vocab_size=299)
    with pytest.raises(ValueError, match="with another tokenizer"):
        prepare(f"tokens:{given}", vocab_size=300, tokenizer=foreign_tokenizer(tmp_path / "other.json"))


def meta(**changes: object) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        described = json.loads((directory / "meta.json").read_text())
        (directory / "meta.json").write_text(json.dumps(described | changes))

    return edit


def flip(directory: Path) -> None:
    content = bytearray((directory / "train.bin").read_bytes())
    content[100] ^= 1
    (directory / "train.bin").write_bytes(content)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: (d / "meta.json").unlink(), r"meta\.json is missing"),
    (meta(format=1), "expected format 2, found 1"),
    (meta(train_tokens="7"), "expected train_tokens .* found '7'"),
    (meta(dtype="object"), "expected dtype to be one of"),
    (meta(val_tokens=10**18), r"val\.bin: expected \d+ bytes"),
    (meta(vocab_size=300), "token ids below vocab_size=300, found 3"),
    (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json does not have the hash"),
    (lambda d: (d / "train.bin").unlink(), r"train\.bin is missing"),
    (lambda d: os.truncate(d / "train.bin", 998), r"train\.bin: expected \d+ bytes .*found 998"),
    (flip, r"train\.bin does not have the hash in meta\.json"),
]


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    for i, (damage, message) in enumerate(DAMAGES):
        spec, cache = jsonl_corpus(tmp_path), tmp_path / str(i)
        directory = prepare(spec, vocab_size=VOCABULARY, cache=cache)
        damage(directory)
        with pytest.raises(ValueError, match=message):
            open_tokens(directory)
        with pytest.raises(ValueError, match=message):
            prepare(spec, vocab_size=VOCABULARY, cache=cache)


# Batches


def counting(length: int) -> np.ndarray:
    """Tokens 0, 1, 2, ...: a token says where it stood."""
    return np.arange(length, dtype=np.uint32)


@given(st.integers(2, 120), st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**40), st.data())
def test_batches_are_pure_and_complete(length: int, wanted: int, batch_size: int, seed: int, data: Any) -> None:
    sequence_length = min(wanted, length - 1)
    windows = (length - 1) // sequence_length
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "seed": seed}
    batches = Batches(counting(length), **sizes)
    steps = -(-3 * windows // batch_size)
    drawn = [batches.batch(step) for step in range(steps)]
    starts: list[int] = []
    for inputs, targets in drawn:
        assert inputs.shape == targets.shape == (batch_size, sequence_length)
        assert inputs.dtype == targets.dtype == torch.int64
        # A window is right if it counts on from where it starts, and targets if they are one more.
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(sequence_length))
        assert torch.equal(targets, inputs + 1)
        starts += inputs[:, 0].tolist()
    for epoch in range(3):
        once = starts[epoch * windows : (epoch + 1) * windows]
        assert sorted(once) == [window * sequence_length for window in range(windows)]
    other = Batches(counting(length), **sizes)  # neither what was asked for before nor the object matters
    for step in data.draw(st.lists(st.integers(0, steps - 1), max_size=5)):
        assert all(torch.equal(a, b) for a, b in zip(other.batch(step), drawn[step], strict=True))


def test_orders_differ_between_seeds_and_epochs() -> None:
    every = [Batches(counting(641), batch_size=64, sequence_length=10, seed=seed) for seed in range(3)]
    orders = [batches.batch(epoch)[0][:, 0].tolist() for batches in every for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9 and orders[0] != sorted(orders[0])


def test_validation_batches_are_the_first_windows_in_order() -> None:
    def starts(max_tokens: int) -> list[list[int]]:
        batches = validation_batches(counting(102), batch_size=3, sequence_length=10, max_tokens=max_tokens)
        assert all(torch.equal(targets, inputs + 1) and inputs.shape[1] == 10 for inputs, targets in batches)
        return [inputs[:, 0].tolist() for inputs, _ in batches]

    assert starts(10) == starts(19) == [[0]]
    assert starts(45) == [[0, 10, 20], [30]]
    # There are ten windows.
    assert starts(100) == starts(10**9) == [[0, 10, 20], [30, 40, 50], [60, 70, 80], [90]]


def test_batches_refuse_what_they_cannot_do() -> None:
    def make(length: int = 9, batch_size: int = 1, sequence_length: int = 8, seed: int = 0) -> Batches:
        return Batches(counting(length), batch_size=batch_size, sequence_length=sequence_length, seed=seed)

    assert make().batch(0)[1].tolist() == [list(range(1, 9))]
    for message, changes in (
        (r"expected at least 9 training tokens .*got 8; use a larger corpus", {"length": 8}),
        ("expected positive sizes, got batch_size=0", {"batch_size": 0}),
        ("expected seed >= 0, got -1", {"seed": -1}),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)
    with pytest.raises(ValueError, match="expected step >= 0, got -1"):
        make().batch(-1)
    with pytest.raises(ValueError, match="expected max_tokens >= sequence_length = 8, got 7"):
        validation_batches(counting(9), batch_size=1, sequence_length=8, max_tokens=7)
