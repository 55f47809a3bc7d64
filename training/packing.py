"""BOS-aligned best-fit packing of documents into rows without padding.

Schwethelm et al. 2026 (arXiv:2604.21106) pack FineWeb-Edu this way, into rows of T + 1 = 2,049
tokens with a buffer of 1,000 documents. A row of T + 1 tokens gives T inputs and, shifted by one,
T targets.

Shapes: B rows of a batch, T positions.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.int32]


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
    """Documents by length; among equals the one that came first."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []  # (length, −arrival), sorted
        self._documents: dict[int, Row] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, document: Row) -> None:
        insort(self._keys, (len(document), -self._arrivals))
        self._documents[self._arrivals] = document
        self._arrivals += 1

    def take(self, space: int) -> Row:
        """Take out the longest document of at most `space` tokens, else the shortest of all."""
        shortest = self._keys[0][0]
        # The last key within `space` is the longest document, and of its length the earliest.
        last = bisect_right(self._keys, (max(space, shortest), 0)) - 1
        return self._documents.pop(-self._keys.pop(last)[1])


def pack(
    documents: Iterable[Sequence[int] | Row],
    *,
    row_length: int,
    bos_token_id: int,
    buffer: int = 1000,
    counts: PackingCounts | None = None,
) -> Iterator[Row]:
    """Yield full rows [row_length] from tokenised documents, BOS put in front of each.

    While a row has space, the buffer is filled up to `buffer` documents and the longest one that
    fits goes in; where none fits, the shortest is cropped to the space and the rest of it is
    lost. Among documents of one length the first goes. So every row begins with BOS and none has
    padding; the last row is dropped if it isn't full. Documents without tokens are skipped.
    `counts` is kept up to date while rows are taken. A step costs O(log buffer) comparisons.
    """
    if row_length < 2 or buffer < 1:
        raise ValueError(
            f"rows of {row_length} tokens from a buffer of {buffer} documents: "
            "data.sequence_length and data.packing_buffer must be at least 1."
        )
    counts = PackingCounts() if counts is None else counts
    arriving = iter(documents)
    waiting = _Buffer()
    row: Row = np.empty(row_length, dtype=np.int32)
    filled = 0
    while True:
        while len(waiting) < buffer and (document := next(arriving, None)) is not None:
            if len(document) > 0:
                waiting.add(np.concatenate(([bos_token_id], document)).astype(np.int32))
                counts.documents += 1
                counts.tokens += len(document) + 1
        if not waiting:
            counts.leftover = filled
            return
        space = row_length - filled
        chosen = waiting.take(space)
        used = min(len(chosen), space)
        row[filled : filled + used] = chosen[:used]
        filled += used
        counts.cropped += len(chosen) - used
        if filled == row_length:
            counts.rows += 1
            yield row
            row, filled = np.empty(row_length, dtype=np.int32), 0


def document_positions(input_ids: torch.Tensor, bos_token_id: int) -> torch.Tensor:
    """Positions that restart at 0 at every BOS, to keep documents apart. [B, T] → [B, T].

    >>> document_positions(torch.tensor([[0, 7, 7, 0, 7]]), bos_token_id=0).tolist()
    [[0, 1, 2, 0, 1]]
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    start = torch.where(input_ids == bos_token_id, position, 0).cummax(dim=1).values  # [B, T]
    return position - start
