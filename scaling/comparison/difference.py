"""Δφ of two tables with its interval: paired resamples where the cells match.

Both tables are refitted on every draw of their (budget, r) cells. Where both hold the same cells, one
draw serves both, so that what a cell's runs share (the same r = 1 runs, the same budget) cancels
in the difference.
"""

from dataclasses import dataclass, field

import numpy as np

from ..fits.bootstrap import cell_membership, draw_cells
from ..fits.fit import JointFit, fit_joint
from ..optima.optima import Laws
from ..record import Record
from ..solver.laws import FloatArray
from ..solver.objective import Design
from ..solver.solve import bounds, solve_resamples, to_law
from .pairing import Pair

MIN_CELLS = 3
_POINTS = 6  # different runs that a draw needs, one per parameter
_APART = 1_000_003  # between the seeds of independent draws


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference(Record):
    """Δφ = φ_variant − φ_baseline.

    Intervals are the 2.5th and 97.5th percentiles over the resamples, None where `reason` says why.
    p_positive: share of resamples with Δφ > 0. paired: both tables were refitted on the same draws of
    cells; pairing says it in words. n_cells: (budget, r) cells of either table. n_redrawn: draws
    that had lost an r or a budget. n_at_bound: resamples with a φ on the solver's bound.
    draws: Δφ of every resample.
    """

    delta_phi: float
    delta_phi_ci: tuple[float, float] | None
    phi_baseline: float
    phi_baseline_ci: tuple[float, float] | None
    phi_variant: float
    phi_variant_ci: tuple[float, float] | None
    p_positive: float | None
    paired: bool
    pairing: str
    n_cells: tuple[int, int]
    n_resamples: int
    n_redrawn: int
    n_at_bound: int
    seed: int
    reason: str | None
    draws: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Refitted:
    """The fits of both tables, and the laws of fit and resamples, row 0 being the fit. [R + 1]."""

    fits: tuple[JointFit, JointFit]
    laws: tuple[Laws, Laws]


def difference(
    pair: Pair, *, delta: float, resamples: int, seed: int, n_starts: int
) -> tuple[Difference, Refitted]:
    """Fit both tables and their resamples. Raises ValueError where a table identifies no φ."""
    fits = (
        fit_joint(pair.baseline, delta=delta, n_starts=n_starts),
        fit_joint(pair.variant, delta=delta, n_starts=n_starts),
    )
    members = tuple(cell_membership(fit.runs) for fit in fits)
    n_cells = (len(members[0]), len(members[1]))
    weights, redrawn, reason = _weights(pair, fits, members, resamples, seed)
    found = [_resampled(fit, rows) for fit, rows in zip(fits, weights, strict=True)]
    phis = [laws.phi[1:] for laws, _ in found]
    draws = phis[1] - phis[0]
    known = len(draws) > 0
    value = Difference(
        delta_phi=fits[1].law.phi - fits[0].law.phi,
        delta_phi_ci=_percentiles(draws),
        phi_baseline=fits[0].law.phi,
        phi_baseline_ci=_percentiles(phis[0]),
        phi_variant=fits[1].law.phi,
        phi_variant_ci=_percentiles(phis[1]),
        p_positive=float(np.mean(draws > 0)) if known else None,
        paired=pair.cells_match,
        pairing=_pairing(pair),
        n_cells=n_cells,
        n_resamples=len(draws),
        n_redrawn=redrawn,
        n_at_bound=int(np.sum(np.logical_or(found[0][1], found[1][1]))) if known else 0,
        seed=seed,
        reason=reason,
        draws=tuple(float(one) for one in draws),
    )
    return value, Refitted(fits=fits, laws=(found[0][0], found[1][0]))


def _percentiles(draws: FloatArray) -> tuple[float, float] | None:
    if len(draws) == 0:
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def _pairing(pair: Pair) -> str:
    if pair.cells_match:
        return (
            "paired: both tables hold the same (budget, r) cells and are refitted on the same draws"
        )
    shared = (
        " although they share their r = 1 runs, which makes the interval wide rather than narrow"
    )
    return (
        "independent: the tables hold different (budget, r) cells, so that each is drawn by itself"
        + (shared if pair.n_reused else "")
    )


def _weights(
    pair: Pair,
    fits: tuple[JointFit, JointFit],
    members: tuple[FloatArray, ...],
    resamples: int,
    seed: int,
) -> tuple[tuple[FloatArray, FloatArray], int, str | None]:
    """How often each run of either table enters each resample, draws thrown away, why there are none."""
    none = (np.empty((0, fits[0].n_runs)), np.empty((0, fits[1].n_runs)))
    fewest = min(len(one) for one in members)
    if fewest < MIN_CELLS:
        return none, 0, f"only {fewest} (budget, r) cells; at least {MIN_CELLS} are needed"
    draw = _paired if pair.cells_match else _independent
    first, second, redrawn = draw(fits, members, resamples, seed)
    if min(len(first), len(second)) < resamples:
        return none, redrawn, "nearly every resample of the cells loses an r or a budget"
    return (first, second), redrawn, None


def _paired(
    fits: tuple[JointFit, JointFit], members: tuple[FloatArray, ...], resamples: int, seed: int
) -> tuple[FloatArray, FloatArray, int]:
    """Draw cells of the baseline; the variant's runs count as often as their cell was drawn."""
    one_of_each = np.argmax(members[0], axis=1)  # a run of every cell
    for more in (1, 2, 4, 8):
        first, redrawn = draw_cells(fits[0].runs, members[0], more * resamples, seed)
        if len(first) == 0:
            break
        second = first[:, one_of_each] @ members[1]
        enough = np.flatnonzero(_points(fits[1], second) >= _POINTS)[:resamples]
        if len(enough) == resamples:
            lost = int(enough[-1]) + 1 - resamples
            return first[enough], second[enough], redrawn + lost
    return np.empty((0, fits[0].n_runs)), np.empty((0, fits[1].n_runs)), redrawn


def _points(fit: JointFit, weights: FloatArray) -> FloatArray:
    """Different runs (N, r, D) in every resample. [R, n] → [R]."""
    runs = fit.runs.groupby(["n", "r", "tokens"]).ngroup().to_numpy()
    entered = np.stack(
        [(weights[:, runs == k] > 0).any(axis=1) for k in range(runs.max() + 1)], axis=1
    )
    return np.asarray(entered.sum(axis=1), dtype=float)


def _independent(
    fits: tuple[JointFit, JointFit], members: tuple[FloatArray, ...], resamples: int, seed: int
) -> tuple[FloatArray, FloatArray, int]:
    first, lost = draw_cells(fits[0].runs, members[0], resamples, seed)
    second, lost_too = draw_cells(fits[1].runs, members[1], resamples, seed + _APART)
    return first, second, lost + lost_too


def _resampled(fit: JointFit, weights: FloatArray) -> tuple[Laws, FloatArray]:
    """Laws of the fit and of every resample, [R + 1], and where φ stopped on its bound, [R]."""
    design: Design = fit.design
    if len(weights) == 0:
        return Laws.of([fit.law]), np.zeros(0, dtype=bool)
    theta, _ = solve_resamples(design, weights, start=fit.law, delta=fit.delta)
    lower, upper = bounds(design, None)
    at_bound = (theta[:, 5] <= lower[5]) | (theta[:, 5] >= upper[5])
    return Laws.of([fit.law, *(to_law(design, row) for row in theta)]), at_bound
