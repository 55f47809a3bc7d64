"""A run's log: log.jsonl says what training did, the same in every repetition; timing.jsonl how fast it went."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from .files import write_text

NAMES = ("log.jsonl", "timing.jsonl")


class RunLog:
    """Both files, open for appending; no files in processes that don't write."""

    def __init__(self, *files: TextIO) -> None:
        self._files = files

    def write(self, *entries: dict[str, Any]) -> None:
        """Append an entry to each file; a killed process loses none of them."""
        for file, entry in zip(self._files, entries, strict=False):
            file.write(json.dumps(entry) + "\n")
            file.flush()

    def sync(self) -> None:
        """Flush to the disk, before a state that comes after these lines."""
        for file in self._files:
            os.fsync(file.fileno())


@contextmanager
def open_log(folder: Path, first: int, write: bool) -> Iterator[RunLog]:
    """Open the logs of a run that goes on after step `first`; what came after it is dropped, torn lines too."""
    with ExitStack() as stack:
        paths = [folder / name for name in NAMES] if write else []
        for path in paths:
            write_text(path, "".join(_until(path, first)))
        yield RunLog(*(stack.enter_context(path.open("a")) for path in paths))


def _until(path: Path, step: int) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
