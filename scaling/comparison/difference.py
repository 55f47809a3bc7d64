"""Δφ of two tables with its interval: paired resamples where the cells match.

Both tables are refitted on every draw of their (budget, r) cells. Where both hold the same cells, one
draw serves both, so that what a cell's runs share (the same r = 1 runs, the same budget) cancels
in the difference.
"""

from dataclasses import dataclass, field

import numpy as np

from ..fits.cells import POINTS, Cells, Counts, cells_of, draw_cells
from ..fits.fit import JointFit, fit_joint
from ..optima.optima import Laws
from ..record import Record
from ..solver.laws import FloatArray
from ..solver.objective import Design
from ..solver.solve import bounds, solve_resamples, to_law
from .pairing import Pair

MIN_CELLS = 3
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
    cells = (cells_of(fits[0].runs), cells_of(fits[1].runs))
    n_cells = (len(cells[0]), len(cells[1]))
    counts, redrawn, reason = _counts(pair, cells, resamples, seed)
    found = [
        _resampled(fit, own.weights(drawn))
        for fit, own, drawn in zip(fits, cells, counts, strict=True)
    ]
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


def _counts(
    pair: Pair, cells: tuple[Cells, Cells], resamples: int, seed: int
) -> tuple[tuple[Counts, Counts], int, str | None]:
    """How often each cell of either table was drawn, draws thrown away, why there are none."""
    none = (np.empty((0, len(cells[0])), dtype=int), np.empty((0, len(cells[1])), dtype=int))
    fewest = min(len(one) for one in cells)
    if fewest < MIN_CELLS:
        return none, 0, f"only {fewest} (budget, r) cells; at least {MIN_CELLS} are needed"
    draw = _paired if pair.cells_match else _independent
    first, second, redrawn = draw(cells, resamples, seed)
    if min(len(first), len(second)) < resamples:
        return none, redrawn, "nearly every resample of the cells loses an r or a budget"
    return (first, second), redrawn, None


def _paired(cells: tuple[Cells, Cells], resamples: int, seed: int) -> tuple[Counts, Counts, int]:
    """Draw cells once for both tables, which hold the same ones."""
    for more in (1, 2, 4, 8):
        counts, redrawn = draw_cells(cells[0], more * resamples, seed)
        if len(counts) == 0:
            break
        points = np.array([cells[1].n_points(row) for row in counts])
        enough = np.flatnonzero(points >= POINTS)[:resamples]
        if len(enough) == resamples:
            lost = int(enough[-1]) + 1 - resamples
            return counts[enough], counts[enough], redrawn + lost
    return counts[:0], counts[:0], redrawn


def _independent(
    cells: tuple[Cells, Cells], resamples: int, seed: int
) -> tuple[Counts, Counts, int]:
    first, lost = draw_cells(cells[0], resamples, seed)
    second, lost_too = draw_cells(cells[1], resamples, seed + _APART)
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
