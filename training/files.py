"""Files that are there whole or not at all: written aside, flushed to the disk, renamed into place."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new one, also after a power cut."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync(path.parent)


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Give an empty folder beside `place` that takes its place when the block ends without an error.

    An error removes it again, so that it doesn't fill the disk; what a killed process left is cleared at the next try.
    """
    partial = place.with_name(place.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)
    os.replace(partial, place)
    _sync(place.parent)


@contextmanager
def naming_a_full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk, whoever wrote, into an OSError that says which and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error):
            raise
        raise OSError(
            f"{folder}: the disk is full ({error}). What was saved before is whole. Free disk space, then run the "
            "same command again to go on."
        ) from error


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
