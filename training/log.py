"""A run's log: log.jsonl says what training did, the same in every repetition; timing.jsonl how fast it went."""

import json
import os
from collections.abc import Callable, Iterator
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
def open_log(
    folder: Path, first: int, every: int, write: bool, warn: Callable[[str], None]
) -> Iterator[RunLog]:
    """Open the logs of a run that logs `every` so many steps and goes on after step `first`.

    What came after `first` is dropped, and lines that are no entries; `warn` is told of steps that are missing then.
    """
    with ExitStack() as stack:
        paths = [folder / name for name in NAMES] if write else []
        for path in paths:
            lines = _until(path, first)
            if missing := set(range(every, first + 1, every)) - lines.keys():
                warn(
                    f"{path} lacks {len(missing)} entries between steps {min(missing)} and {max(missing)}: it was "
                    "damaged. The run goes on, its weights are not affected."
                )
            write_text(path, "".join(lines.values()))
        yield RunLog(*(stack.enter_context(path.open("a")) for path in paths))


def _until(path: Path, last: int) -> dict[int, str]:
    """Lines of the whole entries up to step `last`, by step."""
    lines = {}
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, LookupError):
            continue
        if line.endswith("\n") and isinstance(step, int) and step <= last:
            lines[step] = line
    return lines
