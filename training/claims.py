"""Claims: a run is trained by one process group at a time, whoever starts it, on whatever machine.

A claim is a lock (flock) on out/.claims/<run_id>.lock. The kernel drops it when its process ends, however it ends, so a
killed run is free at once. Folders shared by several machines need a file system whose flock reaches all of them: local
disks, NFS from version 3 on (mounted without nolock or local_lock), Lustre mounted with `flock`, GPFS, CephFS. On one
without flock, filelock warns and takes a marker file in its place.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from .files import write_text

CLAIMED = "claimed elsewhere"  # as an outcome of a run
PATIENCE_S = 1.0  # `holder` takes a free lock for a moment; that must not look like a claim


class ClaimedElsewhere(ValueError):
    """Another process is training the run."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who trains a run: host, process id, and since when (Unix time, seconds)."""

    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.pid} on {self.host} since {since}"


UNNAMED = Holder(host="unknown", pid=0, since=0.0)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the run of a run folder, OUT/RUN_ID, until the block ends; look only inside at whether it is ended.

    Raises
    ------
    ClaimedElsewhere
        If another process holds it; the message names the run, the host, the process and since when.
    """
    lock, note = _lock(folder), _note(folder)
    note.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        raise ClaimedElsewhere(
            f"{folder.name} is being trained by {_read(note)}. Wait for it to end, end it, or give another run_id."
        ) from None
    try:
        holder = Holder(host=socket.gethostname(), pid=os.getpid(), since=time.time())
        write_text(note, json.dumps(asdict(holder)))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def holder(folder: Path) -> Holder | None:
    """Return who trains the run of a run folder now, None if nobody does."""
    lock = _lock(folder)
    if not Path(lock.lock_file).is_file():
        return None
    try:
        with lock.acquire(timeout=0):
            return None
    except Timeout:
        return _read(_note(folder))


def _lock(folder: Path) -> FileLock:
    return FileLock(folder.parent / ".claims" / f"{folder.name}.lock")


def _note(folder: Path) -> Path:
    return folder.parent / ".claims" / f"{folder.name}.holder"


def _read(note: Path) -> Holder:
    try:
        return Holder(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return UNNAMED  # it has just begun, or just ended
