"""Interval of φ by resampling whole (budget, r) cells (`cells`).

Source: Schwethelm et al. 2026 (arXiv:2604.21106), appendix, "Bootstrap procedure".
"""

from dataclasses import dataclass, field

import numpy as np

from ..record import Record
from ..solver.solve import bounds, solve_resamples
from .cells import cells_of, draw_cells
from .fit import JointFit

RESAMPLES = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class PhiInterval(Record):
    """Percentile interval of φ, or the reason why there is none.

    low, high: 2.5th and 97.5th percentile. draws: φ of every resample [n_resamples]. n_redrawn:
    resamples that had lost an r or a budget and were drawn again. n_at_bound: resamples whose φ
    stopped on the solver's bound ±3.
    """

    low: float | None
    high: float | None
    n_resamples: int
    n_cells: int
    n_redrawn: int
    n_at_bound: int
    seed: int
    reason: str | None
    draws: tuple[float, ...] = field(repr=False)


def bootstrap(fit: JointFit, *, resamples: int = RESAMPLES, seed: int = 0) -> PhiInterval:
    """Refit the law on draws of the table's (budget_flops, r) cells and take percentiles of φ.

    The split stays as the fit computed it on the whole table. Without budget_flops, or with
    fewer than three cells, the interval is unavailable and `reason` says why. Raises ValueError
    for a fit whose φ was held.
    """
    if fit.phi_fixed is not None:
        raise ValueError(
            f"phi was held at {fit.phi_fixed:g}, so that it has no interval. Fit with phi=None."
        )
    if resamples < 2:
        raise ValueError(
            f"resamples is {resamples}, but percentiles need at least 2; the paper draws 200."
        )
    if "budget_flops" not in fit.runs or fit.runs["budget_flops"].isna().any():
        return _unavailable(
            "budget_flops is missing for some runs, so that the (budget, r) cells are not known",
            0,
            seed,
        )
    cells = cells_of(fit.runs)
    if len(cells) < 3:
        return _unavailable(
            f"only {len(cells)} (budget, r) cells; at least 3 are needed", len(cells), seed
        )
    counts, redrawn = draw_cells(cells, resamples, seed)
    if len(counts) < resamples:
        return _unavailable(
            "nearly every resample of the cells loses an r or a budget", len(cells), seed
        )
    weights = cells.weights(counts)
    theta, _ = solve_resamples(fit.design, weights, start=fit.law, delta=fit.delta)
    draws = theta[:, 5]
    lower, upper = bounds(fit.design, None)
    low, high = np.percentile(draws, [2.5, 97.5])
    return PhiInterval(
        low=float(low),
        high=float(high),
        n_resamples=resamples,
        n_cells=len(cells),
        n_redrawn=redrawn,
        n_at_bound=int(np.sum((draws <= lower[5]) | (draws >= upper[5]))),
        seed=seed,
        reason=None,
        draws=tuple(float(value) for value in draws),
    )


def _unavailable(reason: str, cells: int, seed: int) -> PhiInterval:
    return PhiInterval(
        low=None,
        high=None,
        n_resamples=0,
        n_cells=cells,
        n_redrawn=0,
        n_at_bound=0,
        seed=seed,
        reason=reason,
        draws=(),
    )
