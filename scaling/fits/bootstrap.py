"""Interval of φ by resampling whole (budget, r) cells.

Runs of one budget and one r share what their cell has in common (learning-rate transfer, rounding
of steps), so that resampling single runs makes intervals too short: cells are drawn with
replacement. Seeds of one setting lie in one cell. Source: Schwethelm et al. 2026
(arXiv:2604.21106), appendix, "Bootstrap procedure".
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..record import Record
from ..solver.laws import FloatArray
from ..solver.solve import bounds, solve_resamples
from .fit import JointFit

RESAMPLES = 200
_TRIES = 50  # draws per wanted resample before giving up


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
    membership = cell_membership(fit.runs)
    if len(membership) < 3:
        return _unavailable(
            f"only {len(membership)} (budget, r) cells; at least 3 are needed",
            len(membership),
            seed,
        )
    weights, redrawn = draw_cells(fit.runs, membership, resamples, seed)
    if len(weights) < resamples:
        return _unavailable(
            "nearly every resample of the cells loses an r or a budget", len(membership), seed
        )
    theta, _ = solve_resamples(fit.design, weights, start=fit.law, delta=fit.delta)
    draws = theta[:, 5]
    lower, upper = bounds(fit.design, None)
    low, high = np.percentile(draws, [2.5, 97.5])
    return PhiInterval(
        low=float(low),
        high=float(high),
        n_resamples=resamples,
        n_cells=len(membership),
        n_redrawn=redrawn,
        n_at_bound=int(np.sum((draws <= lower[5]) | (draws >= upper[5]))),
        seed=seed,
        reason=None,
        draws=tuple(float(value) for value in draws),
    )


def cell_membership(runs: pd.DataFrame) -> FloatArray:
    """Which run lies in which (budget_flops, r) cell: 1 or 0.

    [cells, n], cells by budget, then r.
    """
    groups = runs.groupby(["budget_flops", "r"], sort=True).ngroup().to_numpy()
    return np.asarray(groups[None, :] == np.arange(groups.max() + 1)[:, None], dtype=float)


def draw_cells(
    runs: pd.DataFrame, membership: FloatArray, resamples: int, seed: int
) -> tuple[FloatArray, int]:
    """Count how often each run enters each resample, [resamples, n], and the draws thrown away.

    A draw is thrown away when it has a single r, a single budget, or fewer than six different
    runs. Fewer rows than asked for come back when that happens to nearly all draws.
    """
    generator = np.random.default_rng(seed)
    cells = len(membership)
    budget, r = runs["budget_flops"].to_numpy(), runs["r"].to_numpy()
    kept: list[FloatArray] = []
    redrawn = 0
    for _ in range(_TRIES * resamples):
        weights = np.bincount(generator.integers(cells, size=cells), minlength=cells) @ membership
        present = weights > 0
        enough = len(np.unique(r[present])) >= 2 and len(np.unique(budget[present])) >= 2
        if enough and _points(runs[present]) >= 6:
            kept.append(weights)
            if len(kept) == resamples:
                break
        else:
            redrawn += 1
    return np.array(kept), redrawn


def _points(runs: pd.DataFrame) -> int:
    return len(set(zip(runs["n"], runs["r"], runs["tokens"], strict=True)))


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
