"""Which rows a step reads: a pure function of seed and step, for any number of processes and any micro-batch."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def rows_of_step(step: int, batch_rows: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Return the rows that a step reads, [batch_rows]; each epoch is a permutation of all rows by (seed, epoch).

    >>> first_epoch = [int(i) for step in range(3) for i in rows_of_step(step, 2, 6, seed=0)]
    >>> sorted(first_epoch)
    [0, 1, 2, 3, 4, 5]
    """
    positions = np.arange(step * batch_rows, (step + 1) * batch_rows)
    indices = np.empty(batch_rows, dtype=np.int64)
    for epoch in np.unique(positions // rows):
        here = positions // rows == epoch
        indices[here] = _permutation(rows, seed, int(epoch))[positions[here] % rows]
    return indices


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(rows)
