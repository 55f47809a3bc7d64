"""Iso-FLOPs minima: a parabola in log N through the runs of each (budget, architecture) cell.

Descriptive only: such minima are biased when α ≠ β or when the widths lie to one side
(arXiv:2603.22339); take compute-optimal sizes from the law (`frontier`). Symbols: N = n_once +
n_rec parameters (count), C budget in FLOPs.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..record import Record
from ..runs.kinds import by_architecture


@dataclass(frozen=True, kw_only=True)
class IsoFlopsMinimum(Record):
    """Least-squares parabola c0 + c1·u + c2·u², u = log(N / centre), of one cell.

    n, loss: the minimum's parameters and nats per token, None when it is not determined; then
    `reason` says why. coefficients: (c0, c1, c2), None with fewer than three sizes. n_sizes:
    different N in the cell. effective_depth: executed layers, None where the table does not say.
    """

    budget_flops: float
    r: int
    n_runs: int
    n_sizes: int
    n: float | None
    loss: float | None
    reason: str | None
    centre: float
    coefficients: tuple[float, float, float] | None
    effective_depth: float | None = None


def isoflops_minima(runs: pd.DataFrame) -> tuple[IsoFlopsMinimum, ...]:
    """Fit a parabola to every (budget_flops, r) cell of a table of fitted runs.

    A table with several effective depths has a cell for each. Cells come by budget, then r, then
    depth; none when the table has no budgets. A cell with fewer than three sizes, a parabola that
    opens downwards, or a vertex outside the sizes tried is marked as not determined.
    """
    if "budget_flops" not in runs:
        return ()
    cells = [
        (float(cell["budget_flops"].iloc[0]), depth, cell)
        for _, depth, group in by_architecture(runs)
        for _, cell in group.dropna(subset=["budget_flops"]).groupby("budget_flops")
    ]
    cells.sort(key=lambda one: one[0])  # stable: within a budget by r, then depth
    return tuple(_minimum(cell, depth) for _, depth, cell in cells)


def _minimum(cell: pd.DataFrame, depth: float | None) -> IsoFlopsMinimum:
    log_n, loss = np.log(cell["n"].to_numpy(dtype=float)), cell["loss"].to_numpy(dtype=float)
    centre = float(log_n.mean())
    sizes = len(np.unique(np.round(log_n, 9)))
    n: float | None = None
    lowest: float | None = None
    reason: str | None = None
    coefficients: tuple[float, float, float] | None = None
    if sizes < 3:
        reason = f"{sizes} size{'s' if sizes > 1 else ''}, a parabola needs 3"
    else:
        u = log_n - centre
        c2, c1, c0 = (float(value) for value in np.polyfit(u, loss, 2))
        coefficients = (c0, c1, c2)
        vertex = -c1 / (2 * c2) if c2 != 0 else np.inf
        if c2 <= 0:
            reason = "not convex"
        elif vertex <= u.min():
            reason = "at the edge: still falling towards the smallest size"
        elif vertex >= u.max():
            reason = "at the edge: still falling towards the largest size"
        else:
            n, lowest = float(np.exp(centre + vertex)), c0 + c1 * vertex / 2
    return IsoFlopsMinimum(
        budget_flops=float(cell["budget_flops"].iloc[0]),
        r=int(cell["r"].iloc[0]),
        n_runs=len(cell),
        n_sizes=sizes,
        n=n,
        loss=lowest,
        reason=reason,
        centre=float(np.exp(centre)),
        coefficients=coefficients,
        effective_depth=depth,
    )
