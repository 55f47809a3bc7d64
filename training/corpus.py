"""Where the text comes from: docstrings of installed packages, local files or the Hub.

The default corpus, `docstrings`, needs no download: it is the module, class and function
docstrings of the standard library and of the packages that a recipe names, read from their
installed sources with `ast` and never imported. With the packages that this project installs
anyway it comes to about 40 MB of technical English. Its text is a function of the versions alone
(`Corpus.sources`): tests and the parts of the standard library that distributions package
separately are left out, the order is fixed, and repeated docstrings are kept once.
"""

from __future__ import annotations

import ast
import gc
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:  # the processes that read sources import this module: keep it quick to import
    import datasets

    from .config import DataConfig

LOCAL_BUILDERS = ("parquet", "json", "text")
MIN_DOCSTRING_CHARACTERS = 128  # shorter: four in ten docstrings, a twentieth of the text
POOL_MIN_FILES = 1000  # below, starting processes costs more than it saves

# Folders that are no part of a package's own text, wherever they stand.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})
# Modules that some distributions leave out or package separately, and fixtures of 2to3.
SKIPPED_STANDARD_MODULES = frozenset(
    {"ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtle", "turtledemo"}
)

STATEMENT_FIELDS = ("body", "handlers", "orelse", "finalbody", "cases")  # of the nodes of `ast`


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in a fixed order and where they came from.

    `documents` has the one column `text`; `fingerprint` is the SHA-256 over the documents in
    order; `sources` maps python and each package to its version, or each local file to its size,
    or the Hub dataset to its split; `dropped` counts rows without text.
    """

    documents: datasets.Dataset
    fingerprint: str
    sources: dict[str, str]
    dropped: int = 0


def load_corpus(
    data: DataConfig, *, cache_dir: Path | None = None, progress: bool = False
) -> Corpus:
    """Read the corpus that `data` names; `max_documents` keeps the first ones.

    `corpus` is "docstrings", "parquet", "json" or "text" (with `files`), or the name of a Hub
    dataset. A text file is cut into documents at blank lines: packing crops each document to one
    row, so a whole book as one document would lose all but its beginning. Rows that are empty or
    null are dropped and counted. `cache_dir` is where local files are converted (default: the
    cache of `datasets`). Raises ValueError for a package that is not installed, a file or column
    that is not there, and for a corpus without any text.
    """
    import datasets

    sources = corpus_sources(data)
    if data.corpus == "docstrings":
        texts = _docstring_corpus(data, progress=progress)
        documents = datasets.Dataset.from_dict(
            {"text": texts}, features=datasets.Features({"text": datasets.Value("string")})
        )
        dropped = 0
        digest = fingerprint_texts(texts)
    else:
        documents, digest, dropped = _read_texts(data, cache_dir)
    if len(documents) == 0:
        note = f" ({dropped} rows held no text)" if dropped else ""
        raise ValueError(
            f"data.corpus: {data.corpus!r} holds no documents{note}; "
            "check data.files, data.text_column and data.max_documents."
        )
    return Corpus(documents=documents, fingerprint=digest, sources=sources, dropped=dropped)


def corpus_sources(data: DataConfig) -> dict[str, str]:
    """Versions of the packages or sizes of the files that the corpus is made from."""
    if data.corpus == "docstrings":
        if data.files:
            raise ValueError(
                f"data.files: {data.files[0]!r} is not read by data.corpus = 'docstrings'; "
                f"set data.corpus to one of {', '.join(LOCAL_BUILDERS)}."
            )
        versions = {name: _distribution(name).version for name in data.packages}
        return {"python": platform.python_version(), **versions}
    if data.corpus in LOCAL_BUILDERS:
        return {path: f"{os.path.getsize(path)} bytes" for path in _local_files(data)}
    return {data.corpus: f"{data.dataset_config or 'default'}/{data.dataset_split}"}


def fingerprint_texts(texts: Iterable[str]) -> str:
    """SHA-256 over the texts in order, each with its length in front so that borders count."""
    digest = hashlib.sha256()
    for text in texts:
        _add_text(digest, text)
    return digest.hexdigest()


def cut_document(text: str, characters: int | None) -> list[str]:
    r"""Cut a document at blank lines into parts of at most `characters`; a longer paragraph stays whole.

    >>> cut_document("One.\n\nTwo.\n\nThree.", 12)
    ['One.\n\nTwo.', 'Three.']
    """
    if characters is None or len(text) <= characters:
        return [text]
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        if parts and len(parts[-1]) + 2 + len(paragraph) <= characters:
            parts[-1] += "\n\n" + paragraph
        elif paragraph.strip():
            parts.append(paragraph)
    return parts


def docstrings(source: bytes) -> list[str]:
    r'''List the docstrings of a module's source in their order; none where it doesn't parse.

    Indentation is removed as `inspect.cleandoc` does; nothing is dropped yet.

    >>> docstrings(b'"""A module."""\ndef f():\n    """A function."""\n')
    ['A module.', 'A function.']
    '''
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like in other people's sources
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    found: list[str] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                found.append(inspect.cleandoc(text))
        blocks = (getattr(node, field, ()) for field in STATEMENT_FIELDS)
        stack.extend(reversed([child for block in blocks for child in block]))
    return found


@contextmanager
def progress_bar(
    description: str, total: int | None, *, enabled: bool
) -> Iterator[Callable[[int], None]]:
    """Show a bar with counts and time left; call the value with the number of steps just done."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not enabled) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`; after it they are as they were before."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _docstring_corpus(data: DataConfig, *, progress: bool) -> list[str]:
    """Docstrings of the standard library, then of the packages in order, each text once."""
    files = _standard_library_files()
    for name in data.packages:
        files += _package_files(name)
    limit = data.max_documents
    kept: dict[str, None] = {}  # a set that keeps its order
    in_processes = limit is None and len(files) >= POOL_MIN_FILES
    with (
        _quiet_collector(),
        _read_in_order(files, in_processes=in_processes) as found,
        progress_bar("reading docstrings", len(files), enabled=progress) as advance,
    ):
        for texts in found:
            advance(1)
            kept.update(dict.fromkeys(text for text in texts if _is_document(text)))
            if limit is not None and len(kept) >= limit:
                break
    return list(kept)[:limit]


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Pause the garbage collector: it takes a third of the time of parsing and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _read_in_order(files: list[Path], *, in_processes: bool) -> Iterator[Iterable[list[str]]]:
    """Docstrings file by file, in the order of `files`, read by a few processes or by this one."""
    if not in_processes:
        yield map(_read_docstrings, files)
        return
    workers = min(4, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=gc.disable)
    try:
        yield pool.map(_read_docstrings, files, chunksize=32)
    finally:
        pool.shutdown(cancel_futures=True)  # after an interruption: don't read the rest first


def _read_docstrings(path: Path) -> list[str]:
    return docstrings(path.read_bytes())


def _is_document(text: str) -> bool:
    """Tell whether a docstring is long enough and UTF-8 (escapes can make lone surrogates)."""
    if len(text) < MIN_DOCSTRING_CHARACTERS:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _standard_library_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(sys.stdlib_module_names - SKIPPED_STANDARD_MODULES)
    return [file for name in names for file in _python_files(folder, name)]


def _package_files(distribution: str) -> list[Path]:
    """Python files of a distribution's import packages, found without importing them."""
    files: list[Path] = []
    for name in _import_names(_distribution(distribution)):
        spec = importlib.util.find_spec(name)  # of a top-level name: looks, doesn't import
        if spec is None:
            continue
        for folder in sorted(spec.submodule_search_locations or []):
            files += _python_files(Path(folder).parent, Path(folder).name)
        if spec.submodule_search_locations is None and (spec.origin or "").endswith(".py"):
            files.append(Path(str(spec.origin)))
    if not files:
        raise ValueError(
            f"data.packages: {distribution!r} is installed but has no Python sources to read; leave it out."
        )
    return files


def _python_files(folder: Path, name: str) -> list[Path]:
    """List the module or the package's sources without tests, sorted by relative path."""
    module, package = folder / f"{name}.py", folder / name
    if module.is_file():
        return [module]
    relative = [path.relative_to(folder) for path in package.rglob("*.py")]
    wanted = [path for path in relative if not SKIPPED_FOLDERS.intersection(path.parts[:-1])]
    return [folder / path for path in sorted(wanted, key=lambda path: path.as_posix())]


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        providers = sorted(set(importlib.metadata.packages_distributions().get(name, [])))
        remedy = (
            f"it is imported under that name but installed as {', '.join(providers)}: name that"
            if providers
            else f"pip install {name}, or leave it out of data.packages"
        )
        raise ValueError(f"data.packages: {name!r} is not installed; {remedy}.") from None


def _import_names(distribution: importlib.metadata.Distribution) -> list[str]:
    """Top-level names of a distribution: from its list of files, else from what it declares."""
    paths = [Path(str(file)) for file in distribution.files or []]
    names = {path.parts[0].removesuffix(".py") for path in paths if path.suffix == ".py"}
    names = {name for name in names if name.isidentifier() and not name.startswith("__editable__")}
    if not names:
        names = set((distribution.read_text("top_level.txt") or "").split())
    if not names:
        names = {distribution.metadata["Name"].replace("-", "_")}
    return sorted(names - SKIPPED_FOLDERS)


def _read_texts(data: DataConfig, cache_dir: Path | None) -> tuple[datasets.Dataset, str, int]:
    """Documents with text, their fingerprint, and the number of rows without text."""
    rows = _load_rows(data, cache_dir)
    if data.text_column not in rows.column_names:
        raise ValueError(
            f"data.text_column: {data.corpus!r} has no column {data.text_column!r}; "
            f"it has {', '.join(rows.column_names)}."
        )
    kind = getattr(rows.features[data.text_column], "dtype", None)
    if kind not in ("string", "large_string", "null"):
        raise ValueError(
            f"data.text_column: column {data.text_column!r} of {data.corpus!r} holds "
            f"{kind or 'nested values'}, not text; the columns are {', '.join(rows.column_names)}."
        )
    documents = rows.select_columns([data.text_column])
    if data.text_column != "text":
        documents = documents.rename_column(data.text_column, "text")
    kept: list[int] = []
    digest = hashlib.sha256()
    row = 0
    for batch in documents.iter(batch_size=1000):
        for text in batch["text"]:
            if data.max_documents is not None and len(kept) >= data.max_documents:
                break
            if text is not None and text.strip():
                kept.append(row)
                _add_text(digest, text)
            row += 1
    return documents.select(kept), digest.hexdigest(), row - len(kept)


def _load_rows(data: DataConfig, cache_dir: Path | None) -> datasets.Dataset:
    import datasets

    try:
        with quiet_datasets():
            if data.corpus in LOCAL_BUILDERS:
                return datasets.load_dataset(
                    data.corpus,
                    data_files=_local_files(data),
                    split=data.dataset_split,
                    cache_dir=None if cache_dir is None else str(cache_dir),
                    **({"sample_by": "paragraph"} if data.corpus == "text" else {}),
                )
            return datasets.load_dataset(
                data.corpus,
                data.dataset_config,
                data_files=data.files or None,
                split=data.dataset_split,
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"data.corpus: {data.corpus!r} (dataset_config = {data.dataset_config!r}, "
            f"dataset_split = {data.dataset_split!r}) cannot be loaded: {reason}. Give "
            f"'docstrings', a Hub dataset, or {', '.join(LOCAL_BUILDERS)} with data.files."
        ) from error


def _local_files(data: DataConfig) -> list[str]:
    """Files that `data.files` names, pattern by pattern, each pattern's matches sorted."""
    if not data.files:
        raise ValueError(
            f"data.files: data.corpus = {data.corpus!r} reads local files and none is given; name files or globs."
        )
    found: dict[str, None] = {}
    for pattern in data.files:
        matches = [
            path for path in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(path)
        ]
        if not matches and os.path.isfile(pattern):  # a name with brackets in it
            matches = [pattern]
        if not matches:
            raise ValueError(
                f"data.files: {pattern!r} matches no file (seen from {os.getcwd()}); correct it or remove it."
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _add_text(digest: hashlib._Hash, text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    digest.update(len(raw).to_bytes(8, "little"))
    digest.update(raw)
