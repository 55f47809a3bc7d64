"""Documents to shards of packed rows, each shard on its own: here, or by one process a core.

Which documents make a shard depends on the documents alone, so the rows are the same on any
number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .corpus import cut_document
from .packing import PackingCounts, pack
from .shards import shard_paths, write_shard

if TYPE_CHECKING:  # the processes import this module: keep it quick to import
    import datasets
    from transformers import PreTrainedTokenizerBase

BATCH = 32  # documents that are tokenised together; between batches a process looks up
POOL_MIN_BYTES = 64_000_000  # of text; below, starting processes costs more than it saves


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file to make, and which of the documents its rows are made of."""

    path: Path
    documents: datasets.Dataset
    indices: NDArray[np.int64]

    def texts(self) -> Iterator[list[str]]:
        """Read the documents in batches."""
        for start in range(0, len(self.indices), BATCH):
            yield self.documents[self.indices[start : start + BATCH]]["text"]


@dataclass(frozen=True, kw_only=True)
class Packer:
    """What the rows depend on beside the documents (`DataConfig`); `dtype` is that of the files."""

    tokenizer: PreTrainedTokenizerBase
    row_length: int
    buffer: int
    document_characters: int | None

    @property
    def dtype(self) -> str:
        """uint16 where it holds every token, else int32; the lowest byte first."""
        return "<u2" if max(self.tokenizer.get_vocab().values()) < 2**16 else "<i4"

    def write(self, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Tokenise and pack a shard's documents into its file.

        Returns the counts of `PackingCounts`, the UTF-8 `bytes` of the documents, and `shard`: the
        record of the file, as `write_shard` makes it. `advance` is called with numbers of documents.
        """
        counts, size, dtype = PackingCounts(), 0, self.dtype

        def tokenised() -> Iterator[NDArray[np.integer]]:
            nonlocal size
            for texts in shard.texts():
                size += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
                for ids in self._tokenise(texts):
                    yield np.array(ids, dtype=dtype)
                advance(len(texts))

        blocks = pack(
            tokenised(),
            row_length=self.row_length,
            bos_token_id=int(self.tokenizer.bos_token_id),
            buffer=self.buffer,
            counts=counts,
        )
        written = write_shard(shard.path, blocks, row_length=self.row_length, dtype=dtype)
        return {**asdict(counts), "bytes": size, "shard": written}

    def _tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [part for text in texts for part in cut_document(text, self.document_characters)]
        # A special token spelled out in a text is text: BOS stands in front of documents only.
        ids: list[list[int]] = self.tokenizer(
            parts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,  # no warning about documents longer than the model's context
        )["input_ids"]
        return ids


def plan_shards(
    folder: Path, documents: datasets.Dataset, indices: Sequence[int], *, most: int, buffer: int
) -> list[Shard]:
    """Divide a split's documents into at most `most` shards of at least `buffer` documents each."""
    count = min(most, max(1, len(indices) // buffer))
    parts = np.array_split(np.asarray(indices, dtype=np.int64), count)
    return [
        Shard(path=path, documents=documents, indices=part)
        for path, part in zip(shard_paths(folder, count), parts, strict=True)
    ]


def choose_processes(documents: datasets.Dataset, most: int) -> int:
    """One process a core for a large corpus, 1 (this one) for a small one; never above `most`."""
    if documents.data.nbytes < POOL_MIN_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, most)


def write_shards(
    packer: Packer, shards: Sequence[Shard], *, processes: int, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Write all shards, in this process or in several; returns what `Packer.write` says of each.

    The first error, or an interruption, stops all of them after the batch they are at.
    """
    if processes == 1:
        return [packer.write(shard, advance) for shard in shards]
    context = multiprocessing.get_context("spawn")
    finished, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        processes, context, initializer=_start_worker, initargs=(packer, finished, stop)
    )
    try:
        futures = [pool.submit(_write_in_worker, shard) for shard in shards]
        pending, shown = set(futures), 0
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            advance(finished.value - shown)
            shown = finished.value
        return [future.result() for future in futures]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """Another process failed, or the user interrupted."""


_worker: tuple[Packer, Any, Any]  # of a worker process: packer, documents finished, stop


def _start_worker(packer: Packer, finished: Any, stop: Any) -> None:
    global _worker
    _worker = packer, finished, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and says stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed and can't say stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_in_worker(shard: Shard) -> dict[str, Any]:
    packer, finished, stop = _worker

    def advance(documents: int) -> None:
        if stop.is_set():
            raise _Stopped
        with finished.get_lock():
            finished.value += documents

    return packer.write(shard, advance)
