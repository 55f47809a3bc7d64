"""Where the text comes from: docstrings of installed packages, local files or the Hub.

The default corpus, `docstrings`, needs no download: it is the module, class and function docstrings of the
standard library and of the packages that a recipe names, read from their installed sources with `ast` and never
imported. With the packages that this project installs anyway it comes to about 40 MB of technical English. Its text is
a function of the versions alone (`Corpus.sources`): tests and the parts of the standard library that
distributions package separately are left out, the order is fixed, and repeated docstrings are kept once.
"""

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
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import datasets
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import DataConfig

LOCAL_BUILDERS = ("parquet", "json", "text")
MIN_DOCSTRING_CHARACTERS = 128  # one-liners are four in ten docstrings and one twentieth of the text
POOL_MIN_FILES = 1000  # below, starting processes costs more than it saves

# Folders that are no part of a package's own text, wherever they stand.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})
# Modules that some distributions leave out or package separately, and fixtures of 2to3.
SKIPPED_STANDARD_MODULES = frozenset(
    {"ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtle", "turtledemo"}
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in a fixed order and where they came from.

    `documents` has the one column `text`; `fingerprint` is the SHA-256 over the documents in order; `sources` maps
    python and each package to its version, or each local file to its size; `dropped` counts rows without text.
    """

    documents: datasets.Dataset
    fingerprint: str
    sources: dict[str, str]
    dropped: int = 0


def load_corpus(
    data: DataConfig, *, cache_dir: Path | None = None, progress: bool = False
) -> Corpus:
    """Read the corpus that `data` names; `max_documents` keeps the first ones.

    `corpus` is "docstrings", "parquet", "json" or "text" (with `files`), or the name of a Hub dataset. A text file is cut
    into documents at blank lines: packing crops each document to one row, so a whole book as one document would
    lose all but its beginning. Rows that are empty or null are dropped and counted. `cache_dir` is where local files
    are converted (default: the cache of `datasets`). Raises ValueError for a package that is not installed, a
    file or column that is not there, and for a corpus without any text.
    """
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
    """Say cheaply what the corpus depends on besides `data`: versions of packages or sizes of files."""
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
    return {"datasets": datasets.__version__}


def fingerprint_texts(texts: Iterable[str]) -> str:
    """SHA-256 over the texts in order, each with its length in front: no two lists of texts share their bytes."""
    digest = hashlib.sha256()
    for text in texts:
        _add_text(digest, text)
    return digest.hexdigest()


def docstrings(source: bytes) -> list[str]:
    '''List the docstrings of a module's source in the order they stand in; none where the source doesn't parse.

    Indentation is removed as `inspect.cleandoc` does; nothing is dropped yet.

    >>> docstrings(b'"""A module."""\\ndef f():\\n    """A function."""\\n')
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
        blocks = (getattr(node, field, ()) for field in _BLOCKS)
        stack.extend(reversed([child for block in blocks for child in block]))
    return found


_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields that hold statements


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool) -> Iterator["_Advance"]:
    """Show a bar with counts and time left; the value is called with the number of steps done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not enabled) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)


if sys.version_info:  # a name for the annotation above
    from collections.abc import Callable

    _Advance = Callable[[int], None]
