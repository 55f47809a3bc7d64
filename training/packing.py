"""BOS-aligned best-fit packing of documents into rows without padding.

Schwethelm et al. 2026 (arXiv:2604.21106) pack FineWeb-Edu this way, into rows of T + 1 = 2,049
tokens with a buffer of 1,000 documents. A row of T + 1 tokens gives T inputs and, shifted by one,
T targets.

Shapes: B rows of a batch, T positions; n rows of a block.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import pack as pack_integers
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the processes that pack import this module: keep it quick to import
    import torch

Tokens = Sequence[int] | NDArray[np.integer]


@dataclass(kw_only=True)
class PackingCounts:
    """What `pack` has done so far.

    documents read and their tokens, BOS included; full rows given; tokens cropped off; tokens left
    over in the last, incomplete row. At the end tokens = rows · row_length + cropped + leftover.
    """

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    cropped: int = 0
    leftover: int = 0


class _Buffer:
    """Documents by their length with BOS; among equals the one that came first goes first.

    One queue a length up to that of a row; the lengths present are the bits of an integer, so that
    the longest within a space is the highest bit at or below it. Longer documents wait in a heap.
    """

    def __init__(self, row_length: int) -> None:
        self.size = 0
        self._row_length = row_length
        self._queues: defaultdict[int, deque[Tokens]] = defaultdict(deque)
        self._present = 0
        self._longer: list[tuple[int, int, Tokens]] = []  # (length, arrival, document)
        self._arrivals = 0

    def add(self, document: Tokens, length: int) -> None:
        self.size += 1
        if length > self._row_length:
            self._arrivals += 1
            heapq.heappush(self._longer, (length, self._arrivals, document))
            return
        self._queues[length].append(document)
        self._present |= 1 << length

    def take(self, space: int) -> Tokens:
        """Take out the longest document of at most `space` tokens, else the shortest of all."""
        self.size -= 1
        fitting = self._present & ((2 << space) - 1)
        if fitting:
            length = fitting.bit_length() - 1
        elif self._present:
            length = (self._present & -self._present).bit_length() - 1
        else:
            return heapq.heappop(self._longer)[2]
        queue = self._queues[length]
        document = queue.popleft()
        if not queue:
            self._present ^= 1 << length
        return document


def pack(
    documents: Iterable[Tokens],
    *,
    row_length: int,
    bos_token_id: int,
    buffer: int = 1000,
    block_rows: int = 1024,
    counts: PackingCounts | None = None,
) -> Iterator[NDArray[np.int32]]:
    """Yield blocks of full rows [n, row_length] from tokenised documents, BOS put in front of each.

    While a row has space, the buffer is filled up to `buffer` documents and the longest one that
    fits goes in; where none fits, the shortest is cropped to the space and the rest of it is
    lost. Among documents of one length the first goes. So every row begins with BOS and none has
    padding; the last row is dropped if it isn't full. Documents without tokens are skipped. Blocks
    have n = `block_rows` rows, the last one perhaps fewer. `counts` is up to date at every block.
    A choice costs a few operations on integers of `row_length` bits, whatever the buffer holds.
    """
    if row_length < 2 or buffer < 1:
        raise ValueError(
            f"rows of {row_length} tokens from a buffer of {buffer} documents: "
            "data.sequence_length and data.packing_buffer must be at least 1."
        )
    counts = PackingCounts() if counts is None else counts
    arriving = iter(documents)
    waiting = _Buffer(row_length)
    bos = np.array([bos_token_id], dtype=np.int32)
    pieces: list[NDArray[np.integer]] = []
    rows, filled = 0, 0  # of the block; tokens of the row that is being filled
    while True:
        while waiting.size < buffer and (document := next(arriving, None)) is not None:
            length = len(document) + 1
            if length > 1:
                waiting.add(document, length)
                counts.documents += 1
                counts.tokens += length
        if not waiting.size:
            break
        space = row_length - filled
        chosen = waiting.take(space)
        length = len(chosen) + 1
        if length > space:
            counts.cropped += length - space
            chosen, length = chosen[: space - 1], space
        pieces += (bos, _as_array(chosen))
        filled += length
        if filled < row_length:
            continue
        rows, filled = rows + 1, 0
        if rows == block_rows:
            counts.rows += rows
            yield _join(pieces, rows, row_length)
            pieces, rows = [], 0
    counts.leftover = filled
    if rows:
        counts.rows += rows
        yield _join(pieces, rows, row_length)


def _as_array(tokens: Tokens) -> NDArray[np.integer]:
    """Give tokens as an array; `struct` converts lists in half the time that numpy takes."""
    if isinstance(tokens, np.ndarray):
        return tokens
    return np.frombuffer(pack_integers(f"{len(tokens)}i", *tokens), dtype=np.intc)


def _join(pieces: list[NDArray[np.integer]], rows: int, row_length: int) -> NDArray[np.int32]:
    """Lay pieces end to end into rows; what is beyond the last full row is dropped."""
    joined = np.concatenate(pieces, dtype=np.int32, casting="same_kind")
    return joined[: rows * row_length].reshape(rows, row_length)


def document_positions(input_ids: torch.Tensor, bos_token_id: int) -> torch.Tensor:
    """Positions that restart at 0 at every BOS, to keep documents apart. [B, T] → [B, T].

    >>> import torch
    >>> document_positions(torch.tensor([[0, 7, 7, 0, 7]]), bos_token_id=0).tolist()
    [[0, 1, 2, 0, 1]]
    """
    import torch

    position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    start = torch.where(input_ids == bos_token_id, position, 0).cummax(dim=1).values  # [B, T]
    return position - start
