"""Rows of tokens in memory-mapped files: written, verified, read.

The rows of a split stand in a folder of shards, `00000-of-00016.npy` and so on, arrays
[rows, T + 1] in NumPy's format that any program reads with `np.load(path, mmap_mode="r")`.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, DTypeLike, NDArray


class Rows:
    """Rows of one split, memory-mapped: `rows[indices]` gives int32 [n, T + 1] for indices [n]."""

    def __init__(self, shards: Sequence[NDArray[np.integer]]) -> None:
        self.shards = tuple(shards)
        self._starts = np.cumsum([0, *map(len, shards)])  # of each shard, and the end

    def __len__(self) -> int:
        """Count the rows."""
        return int(self._starts[-1])

    def __getitem__(self, indices: ArrayLike) -> NDArray[np.int32]:
        """Read rows by their numbers over all shards in order. [n] → [n, T + 1]."""
        wanted = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(
                f"rows {wanted.min()} to {wanted.max()} asked of {len(self)} rows (from 0)"
            )
        shard_of_row = np.searchsorted(self._starts, wanted, side="right") - 1
        rows = np.empty((len(wanted), self.shards[0].shape[1]), dtype=np.int32)
        for shard in np.unique(shard_of_row):
            here = shard_of_row == shard
            rows[here] = self.shards[shard][wanted[here] - self._starts[shard]]
        return rows

    def fingerprint(self) -> str:
        """SHA-256 over all rows in order, as int32, whatever the shards' dtype and number."""
        digest = hashlib.sha256()
        for shard in self.shards:
            for start in range(0, len(shard), 1024):
                digest.update(shard[start : start + 1024].astype("<i4").tobytes())
        return digest.hexdigest()


def shard_paths(folder: Path, count: int) -> list[Path]:
    """Name the `count` shards in a split's folder, in order."""
    return [folder / f"{index:05d}-of-{count:05d}.npy" for index in range(count)]


def write_shard(
    path: Path, blocks: Iterable[NDArray[np.integer]], *, row_length: int, dtype: DTypeLike
) -> dict[str, Any]:
    """Write blocks of rows [n, row_length] as they come; returns the record of the file.

    The record has `file` (its name), `rows`, `bytes` and `sha256` of the file. `dtype` must hold
    every token (not checked).
    """
    rows = 0
    with path.open("w+b") as file:
        _write_header(file, rows, row_length, dtype)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
            rows += len(block)
        file.seek(0)
        _write_header(file, rows, row_length, dtype)  # as long as before: NumPy leaves room in it
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    size = path.stat().st_size
    return {"file": path.name, "rows": rows, "bytes": size, "sha256": digest.hexdigest()}


def _write_header(file: Any, rows: int, row_length: int, dtype: DTypeLike) -> None:
    header = {"shape": (rows, row_length), "fortran_order": False}
    npy.write_array_header_1_0(file, header | {"descr": npy.dtype_to_descr(np.dtype(dtype))})


def open_shards(folder: Path, records: Sequence[Mapping[str, Any]], row_length: int) -> Rows:
    """Open the shards of a split's folder after comparing each with its record.

    Records are those of `write_shard`. Every byte is read, by as many threads as there are cores.
    Raises ValueError that names the file and what is wrong.
    """
    recorded = {record["file"] for record in records}
    for path in sorted(folder.glob("*.npy")):
        if path.name not in recorded:
            raise _broken(path, "is not among the shards that metadata.json lists")
    with ThreadPoolExecutor(min(len(records), os.cpu_count() or 1)) as threads:
        opened = threads.map(lambda record: _open_shard(folder, record, row_length), records)
        return Rows(list(opened))


def _open_shard(folder: Path, record: Mapping[str, Any], row_length: int) -> NDArray[np.integer]:
    path = folder / record["file"]
    if not path.is_file():
        raise _broken(path, "is missing")
    size = path.stat().st_size
    if size != record["bytes"]:
        raise _broken(path, f"has {size} bytes, metadata.json says {record['bytes']}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != record["sha256"]:
        raise _broken(
            path, f"has changed: sha256 {digest[:12]}, metadata.json says {record['sha256'][:12]}"
        )
    rows = np.load(path, mmap_mode="r")
    if rows.shape != (record["rows"], row_length):
        raise _broken(
            path, f"holds {rows.shape}, metadata.json says {(record['rows'], row_length)}"
        )
    return rows.view(np.ndarray)  # the same pages, without np.memmap's slower indexing


def _broken(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"packed data: {path} {problem}; restore the file, or delete {path.parents[1]} and prepare "
        "it again."
    )
