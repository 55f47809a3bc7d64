"""The (budget, r) cells of a table, and resamples of whole cells.

Runs of one budget and one r share what their cell has in common (learning-rate transfer, rounding
of steps), so that resampling single runs makes intervals too short: cells are drawn with
replacement. Seeds of one setting lie in one cell. Source: Schwethelm et al. 2026
(arXiv:2604.21106), appendix, "Bootstrap procedure".
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..solver.laws import FloatArray

Counts = NDArray[np.intp]  # how often each cell was drawn, [resamples, cells]

POINTS = 6  # different runs that a resample must hold: the law's parameters
_TRIES = 50  # draws per wanted resample before giving up


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """Cells by budget, then r.

    of_run: the cell of every run [n]. budget (FLOPs), r: of every cell [cells]. points: which
    different (N, r, D), numbered over the table, lie in every cell.
    """

    of_run: NDArray[np.intp]
    budget: FloatArray
    r: FloatArray
    points: tuple[NDArray[np.intp], ...]

    def __len__(self) -> int:
        return len(self.r)

    def weights(self, counts: Counts) -> FloatArray:
        """How often each run enters each resample. [resamples, cells] → [resamples, n]."""
        return counts.astype(float)[:, self.of_run]

    def n_points(self, counts: NDArray[np.intp]) -> int:
        """How many different (N, r, D) one resample holds. [cells] → number."""
        return len(np.unique(np.concatenate([self.points[k] for k in np.flatnonzero(counts)])))


def cells_of(runs: pd.DataFrame) -> Cells:
    """Find the cells of a table (`table.RunTable.runs` with a budget for every run)."""
    groups = runs.groupby(["budget_flops", "r"], sort=True)
    first = groups.head(1).sort_values(["budget_flops", "r"])
    of_run = groups.ngroup().to_numpy()
    points = pd.DataFrame(
        {"cell": of_run, "point": runs.groupby(["n", "r", "tokens"], sort=False).ngroup()}
    ).drop_duplicates()
    return Cells(
        of_run=np.asarray(of_run, dtype=np.intp),
        budget=first["budget_flops"].to_numpy(dtype=float),
        r=first["r"].to_numpy(dtype=float),
        points=tuple(group["point"].to_numpy() for _, group in points.groupby("cell", sort=True)),
    )


def draw_cells(cells: Cells, resamples: int, seed: int) -> tuple[Counts, int]:
    """Count how often each cell enters each resample, [resamples, cells], and the draws thrown away.

    A draw is thrown away when it has a single r, a single budget, or fewer than six different
    runs. Fewer rows than asked for come back when that happens to nearly all draws.
    """
    generator = np.random.default_rng(seed)
    kept: list[NDArray[np.intp]] = []
    redrawn = 0
    for _ in range(_TRIES * resamples):
        counts = np.bincount(generator.integers(len(cells), size=len(cells)), minlength=len(cells))
        present = counts > 0
        crossed = len(set(cells.r[present])) >= 2 and len(set(cells.budget[present])) >= 2
        if crossed and cells.n_points(counts) >= POINTS:
            kept.append(counts)
            if len(kept) == resamples:
                break
        else:
            redrawn += 1
    return np.array(kept, dtype=np.intp).reshape(-1, len(cells)), redrawn
