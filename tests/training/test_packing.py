"""Packing against a linear scan that shares no code with it, and invariants of any documents."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.packing import PackingCounts, document_positions, pack

BOS = 0
documents_of_any_length = st.lists(
    st.lists(st.integers(1, 99), min_size=0, max_size=30), min_size=0, max_size=60
)
settings_quick = settings(max_examples=200, deadline=None)


def packed_rows(documents, **arguments):
    """Rows [n, row_length] of all blocks."""
    blocks = list(pack(documents, bos_token_id=BOS, **arguments))
    return np.concatenate([np.empty((0, arguments["row_length"]), dtype=np.int32), *blocks])


def naive_rows(documents, row_length, buffer):
    """The rule read out loud: scan the whole buffer for every document."""
    queue = [[BOS, *document] for document in documents if document]
    waiting, rows, row = [], [], []
    while True:
        while len(waiting) < buffer and queue:
            waiting.append(queue.pop(0))
        if not waiting:
            return rows
        space = row_length - len(row)
        best = None
        for i, document in enumerate(waiting):
            if len(document) <= space and (best is None or len(document) > len(waiting[best])):
                best = i
        if best is None:
            best = 0
            for i, document in enumerate(waiting):
                if len(document) < len(waiting[best]):
                    best = i
        row += waiting.pop(best)[:space]
        if len(row) == row_length:
            rows.append(row)
            row = []


@settings_quick
@given(
    documents=documents_of_any_length,
    row_length=st.integers(2, 20),
    buffer=st.integers(1, 12),
    block_rows=st.integers(1, 6),
)
def test_rows_equal_those_of_a_linear_scan(documents, row_length, buffer, block_rows):
    """Equal, not close: packing has no rounding. As lists and as arrays of the dtypes in use, in blocks of any size."""
    expected = naive_rows(documents, row_length, buffer)
    options = {"row_length": row_length, "buffer": buffer, "block_rows": block_rows}
    assert packed_rows(documents, **options).tolist() == expected
    for dtype in (np.uint16, np.int32, np.int64):
        arrays = [np.array(document, dtype=dtype) for document in documents]
        assert packed_rows(arrays, **options).tolist() == expected


def test_long_rows_and_documents_equal_those_of_a_linear_scan():
    """Log-normal lengths, as in text, around rows of 257; also where lists and arrays take turns."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(5, 1.2, 400)).astype(int)
    documents = [rng.integers(1, 70_000, length).tolist() for length in lengths]
    mixed = [np.array(d, dtype=np.int32) if i % 2 else d for i, d in enumerate(documents)]
    rows = packed_rows(mixed, row_length=257, buffer=50)
    assert rows.tolist() == naive_rows(documents, 257, 50)


def test_blocks_have_the_rows_asked_for_and_counts_go_along():
    """100 documents of 4 + BOS into rows of 10: 50 rows, in blocks of 16, 16, 16 and 2."""
    counts, seen = PackingCounts(), []
    options = {"row_length": 10, "bos_token_id": BOS, "block_rows": 16, "counts": counts}
    for block in pack([[1, 2, 3, 4]] * 100, **options):
        seen.append((len(block), counts.rows))
    assert seen == [(16, 16), (16, 32), (16, 48), (2, 50)]


@settings_quick
@given(documents=documents_of_any_length, row_length=st.integers(2, 20))
def test_every_row_is_full_and_begins_with_bos_and_no_token_is_unaccounted(documents, row_length):
    counts = PackingCounts()
    rows = packed_rows(documents, row_length=row_length, buffer=7, counts=counts)
    assert rows.dtype == np.int32
    assert (rows[:, 0] == BOS).all()
    kept = [document for document in documents if document]
    assert counts.documents == len(kept)
    assert counts.tokens == sum(len(document) + 1 for document in kept)
    assert counts.rows == len(rows)
    assert counts.tokens == counts.rows * row_length + counts.cropped + counts.leftover
    assert counts.leftover < row_length


@settings_quick
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), row_length=st.integers(2, 20))
def test_every_piece_is_the_beginning_of_a_document_that_is_used_once(lengths, row_length):
    """Documents made of their own number show which one a piece came from."""
    documents = [[number + 1] * length for number, length in enumerate(lengths)]
    rows = packed_rows(documents, row_length=row_length, buffer=5)
    seen = []
    for row in rows:
        for piece in np.split(row, np.flatnonzero(row == BOS)[1:]):
            body = piece[1:]
            if len(body):
                assert len(set(body.tolist())) == 1
                assert len(body) <= lengths[body[0] - 1]
                seen.append(int(body[0]))
    assert len(seen) == len(set(seen))


def test_the_longest_document_that_fits_goes_first_and_the_shortest_is_cropped():
    """A row of 8: 5 + BOS fills 6; nothing fits the last 2; the shortest, 3 + BOS, is cropped."""
    documents = [[1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 3]]
    rows = packed_rows(documents, row_length=8, buffer=3)
    assert rows[0].tolist() == [0, 2, 2, 2, 2, 2, 0, 1]


def test_documents_are_read_no_further_than_the_buffer_needs():
    """A row that one document fills needs the buffer's three documents and nothing behind them."""
    read = []

    def endless():
        while True:
            read.append(1)
            yield [5] * 9

    next(pack(endless(), row_length=10, bos_token_id=BOS, buffer=3, block_rows=1))
    assert len(read) == 3


@pytest.mark.parametrize("wrong", [{"row_length": 1}, {"row_length": 8, "buffer": 0}])
def test_a_row_without_target_or_an_empty_buffer_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        next(pack([[1]], bos_token_id=BOS, **wrong))


@settings_quick
@given(
    row=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    other=st.integers(0, 2),
)
def test_positions_count_up_and_restart_at_bos(row, other):
    """A counter in a loop is the referee; rows of a batch don't touch each other."""
    batch = torch.tensor([row, [other] * len(row)])
    expected = []
    for ids in batch.tolist():
        position, positions = -1, []
        for token in ids:
            position = 0 if token == BOS else position + 1
            positions.append(position)
        expected.append(positions)
    assert document_positions(batch, BOS).tolist() == expected
