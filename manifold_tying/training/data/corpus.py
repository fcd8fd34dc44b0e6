"""Corpus specs, such as ``text:book.txt``, and the documents they name, always in the same order."""

import ast
import importlib.util
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manifold_tying._json import parsed

SPEC_FORMS = """the forms are
  stdlib                        the source of the running Python's standard library
  docstrings[:PACKAGE,...]      docstrings of installed packages; by default numpy, scipy, pandas and sympy
  text:PATH[,PATH...]           files, or folders with all UTF-8 files below them; one document per file
  jsonl:PATH[,PATH...]          files, or folders with *.jsonl; one document per line, in the field "text"
  parquet:PATH[,PATH...]        files, or folders with *.parquet; one document per row, in the column "text"
  hf:NAME[:CONFIG[:SPLIT]]      a Hugging Face dataset with a column "text", streamed; SPLIT is train by default
  tokens:DIR                    a prepared token directory"""

PACKAGES = ("numpy", "scipy", "pandas", "sympy")  # installed with torch and the extra `train`
SHORTEST = 200  # fewest characters of a module's docstrings that make a document
_BLOCK = 1 << 20  # characters per read
# Tests and installed packages vary more between machines than the library does.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


@dataclass(frozen=True)
class Corpus:
    """A source of documents.

    ``identity`` is serializable to JSON; corpora with equal identities have the same documents. Local files are identified
    by path, size and modification time, so that a prepared corpus is recognized without reading it. ``documents()`` starts a
    new pass. Each document is a sequence of texts to join, which are in memory one at a time.
    """

    spec: str  # as the user wrote it
    identity: list[object]
    streamed: bool  # it may be too large to read whole, and is read only as far as needed
    documents: Callable[[], Iterator[Iterable[str]]]
    skipped: list[Path] = field(default_factory=list)  # not UTF-8, in a folder of texts; filled by a pass


def open_corpus(spec: str) -> Corpus:
    """The corpus that a spec names (in any form but ``tokens:``), without reading its text."""
    kind, colon, rest = spec.partition(":")
    malformed = {"stdlib": bool(colon), "docstrings": bool(colon) and not rest}.get(kind, not colon)
    if kind not in _OPENERS or malformed:
        raise ValueError(f"unknown corpus {spec!r}; {SPEC_FORMS}")
    return _OPENERS[kind](spec, rest)


def _stdlib(spec: str, rest: str) -> Corpus:
    files = _files_below(Path(sysconfig.get_paths()["stdlib"]), ".py", _NOT_STDLIB)
    identity: list[object] = ["stdlib", platform.python_version(), _listing(files)]
    return Corpus(spec, identity, False, lambda: (_parts(file) for file in files if _is_text(file)))


def _docstrings(spec: str, rest: str) -> Corpus:
    packages = tuple(name.strip() for name in rest.split(",")) if rest else PACKAGES
    files = [file for name in packages for file in _files_below(_package_root(name), ".py", {"tests", "__pycache__"})]
    # Versions of Python clean docstrings differently.
    identity: list[object] = ["docstrings", platform.python_version(), _listing(files)]
    return Corpus(spec, identity, False, lambda: ((text,) for file in files if (text := _document(file)) is not None))


def _text(spec: str, rest: str) -> Corpus:
    files, skipped = _expand(spec, rest, ""), list[Path]()
    named = {Path(part.strip()).expanduser() for part in rest.split(",")}

    def documents() -> Iterator[Iterable[str]]:
        skipped.clear()
        for file in files:
            if _is_text(file):
                yield _parts(file)
            elif file in named:
                raise ValueError(f"{file} is not UTF-8; convert it, or leave it out of {spec!r}")
            else:
                skipped.append(file)

    return Corpus(spec, ["text", _listing(files)], False, documents, skipped)


def _jsonl(spec: str, rest: str) -> Corpus:
    files = _expand(spec, rest, ".jsonl")

    def documents() -> Iterator[Iterable[str]]:
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield (_json_text(line, f"{file}, line {number}"),)

    return Corpus(spec, ["jsonl", _listing(files)], False, documents)


def _parquet(spec: str, rest: str) -> Corpus:
    files = _expand(spec, rest, ".parquet")

    def documents() -> Iterator[Iterable[str]]:
        import pyarrow.parquet  # slow to import, rarely needed

        for file in files:
            rows = 0
            try:
                with pyarrow.parquet.ParquetFile(file) as table:
                    if "text" not in table.schema_arrow.names:
                        raise ValueError(f'{file} has no column "text"; it has {table.schema_arrow.names}')
                    for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                        texts = batch.column(0).to_pylist()
                        rows += len(texts)
                        yield from ((_checked(text, str(file)),) for text in texts)
                    if rows != table.metadata.num_rows:  # pyarrow stops at a page of zeros without an error
                        raise OSError(f"{rows} of its {table.metadata.num_rows} rows can be read")
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} is damaged, or not a parquet file: {error}") from error

    return Corpus(spec, ["parquet", _listing(files)], False, documents)


def _hub(spec: str, rest: str) -> Corpus:
    parts = rest.split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"expected hf:NAME[:CONFIG[:SPLIT]], got {spec!r}")
    name, config, split = (*parts, "", "")[:3]
    split = split or "train"
    local = Path(name).expanduser()
    identity: list[object] = ["hf", name, config, split]
    if local.is_dir():
        name = str(local.absolute())
        identity.append(_listing(_files_below(local, "", set())))

    def documents() -> Iterator[Iterable[str]]:
        import datasets  # takes seconds to import

        try:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"cannot open the dataset of {spec!r}: {error}") from error
        # One process, no shuffling: sorted files, each row by row.
        for row in rows:
            if "text" not in row:
                raise ValueError(f'the dataset of {spec!r} has no column "text"; it has {sorted(row)}')
            yield (_checked(row["text"], f"the dataset of {spec!r}"),)

    return Corpus(spec, identity, True, documents)


_OPENERS = {
    "stdlib": _stdlib, "docstrings": _docstrings, "text": _text, "jsonl": _jsonl, "parquet": _parquet, "hf": _hub
}  # fmt: skip


def _expand(spec: str, paths: str, suffix: str) -> list[Path]:
    """All files of a comma-separated list of files and folders, in order; each once, or it might be held out and trained on."""
    files: dict[Path, Path] = {}
    for name in map(str.strip, paths.split(",")):
        path = Path(name).expanduser()
        if not name or not (path.is_dir() or path.is_file()):
            raise ValueError(f"no file or folder {name!r}, named in {spec!r}; separate several paths by commas")
        for file in _files_below(path, suffix, set()) if path.is_dir() else [path]:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _files_below(root: Path, suffix: str, excluded: set[str]) -> list[Path]:
    """Regular files below root whose name ends in suffix, by relative path; skips hidden files and links to folders.

    Reading a FIFO or a device might never end; a link may lead nowhere. Raises OSError if a folder cannot be listed.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        paths = [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _listing(files: list[Path]) -> list[tuple[str, int, int]]:
    stats = [(str(file.absolute()), file.stat()) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _parts(file: Path) -> Iterator[str]:
    """The unchanged text of a UTF-8 file, including line ends, in parts that fit into memory."""
    with file.open(encoding="utf-8", newline="") as content:
        while block := content.read(_BLOCK):
            yield block


def _is_text(file: Path) -> bool:
    """Whether all of a file is UTF-8."""
    try:
        for _ in _parts(file):
            pass
    except UnicodeDecodeError:
        return False
    return True


def _json_text(line: bytes, where: str) -> str:
    try:
        row = parsed(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or "text" not in row:
        raise ValueError(f'{where}: expected an object with the field "text", got {line[:80]!r}')
    return _checked(row["text"], where)


def _checked(text: object, where: str) -> str:
    """Check the text of one document; null means an empty one."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a string as the text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise ValueError(f"{where}: the text is not valid Unicode: {error}") from error
    return text


def _package_root(package: str) -> Path:
    """The folder of an installed package, without importing it; raises ValueError if it is missing."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise ValueError(f"expected the name of an installed package, got {package!r}; pip install it or leave it out")
    return Path(spec.origin).parent


def _document(file: Path) -> str | None:
    """The docstrings of a module, its classes and functions, outer ones first; None if there is too little text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates, another version's syntax
        return None
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    text = "\n\n".join(filter(None, found))
    return text if len(text) >= SHORTEST else None
