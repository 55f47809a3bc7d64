"""The order of the rows: a permutation an epoch, the same for every batch size and process count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.sampler import rows_of_step


def concatenated(total, batch_rows, rows, seed):
    steps = -(-total // batch_rows)
    taken = [rows_of_step(step, batch_rows, rows, seed) for step in range(steps)]
    assert all(part.shape == (batch_rows,) for part in taken)
    return np.concatenate(taken)[:total]


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 40), batch_rows=st.integers(1, 50), seed=st.integers(0, 2**31 - 1))
def test_each_epoch_is_a_permutation_of_all_rows_whatever_the_batch(rows, batch_rows, seed):
    """A batch larger than an epoch reads several."""
    order = concatenated(3 * rows, batch_rows, rows, seed)
    for epoch in np.split(order, 3):
        assert sorted(epoch.tolist()) == list(range(rows))


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 40), sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_the_order_does_not_depend_on_the_batch_size(rows, sizes):
    one, other = (concatenated(100, size, rows, seed=5) for size in sizes)
    np.testing.assert_array_equal(one, other)


def test_epochs_and_seeds_have_orders_of_their_own():
    """100! orders: two equal ones would be no chance."""
    order = concatenated(300, 10, 100, seed=0)
    assert len({tuple(epoch) for epoch in np.split(order, 3)}) == 3
    assert tuple(order[:100]) != tuple(concatenated(100, 10, 100, seed=1))


def test_a_step_is_the_same_asked_alone_or_after_others():
    """Resuming in the middle reads what an uninterrupted run would have."""
    expected = concatenated(280, 7, 30, seed=3).reshape(40, 7)
    for step in (39, 4, 17, 0):
        np.testing.assert_array_equal(rows_of_step(step, 7, 30, seed=3), expected[step])


@pytest.mark.parametrize("rows", [5, 64, 1000])
def test_rows_are_indices_of_numpy(rows):
    found = rows_of_step(2, 8, rows, seed=0)
    assert found.dtype == np.int64 and found.min() >= 0 and found.max() < rows
