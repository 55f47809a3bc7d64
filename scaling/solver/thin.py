"""A few of the runs of a large table, for the search: which optimum is the lowest needs no million runs.

Solvers send their starts down on these runs; the best ends then go on to the optimum on all runs.
"""

from dataclasses import dataclass

import numpy as np

from .laws import FloatArray
from .objective import Design

MOST = 5_000  # runs of the search; a table up to this size is searched whole


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """Runs that the starts go down on, and the weights of the resamples there, [R, runs].

    whole: these are all runs, so that an end is an optimum.
    """

    design: Design
    weights: FloatArray
    whole: bool


def search_runs(design: Design, weights: FloatArray, most: int | None = None) -> Search:
    """Take at most `most` runs (default `MOST`), as many of every r as there are, evenly over N, then D.

    A run stands for others of its r: its weight is multiplied by how many. `weights` [R, n].
    """
    most = MOST if most is None else most
    if design.n <= most:
        return Search(design=design, weights=weights, whole=True)
    _, group, count = np.unique(np.round(design.log_r, 9), return_inverse=True, return_counts=True)
    order = np.lexsort((design.log_d, design.once + design.rec, group))
    share = max(1, most // len(count))
    ends = np.cumsum(count)
    taken = np.concatenate(
        [
            order[np.linspace(end - size, end - 1, min(size, share)).astype(int)]
            for end, size in zip(ends, count, strict=True)
        ]
    )
    stands_for = (count / np.minimum(count, share))[group[taken]]
    return Search(design=design.part(taken), weights=weights[:, taken] * stands_for, whole=False)
