"""The cheapest part of a grid that still gives an interval of the wanted width.

Candidates take some of the grid's budgets, its smallest r with some of the others, and 3 or more of
each budget's widths, evenly spaced (`parts`). The large-sample width (`forecast.Sensitivity`) orders them all;
those that promise enough are simulated, cheapest first, until one keeps the promise. The search
knows of no drift of φ with scale and no limit of the law: offer it only budgets that you trust.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..optima.frontier import Architecture
from ..record import Record
from ..solver.laws import JointLaw
from .design import Grid, planned_runs
from .forecast import (
    Forecast,
    Sensitivity,
    approximate_delta_width,
    approximate_width,
    simulate,
)
from .noise import Noise

MIN_CELLS = 10  # percentiles over fewer (budget, r) blocks are rough
MIN_WIDTHS = 3  # a budget's parabola needs as many
_MOST_SIMULATED = 8  # candidates per wanted width
_STEP = 0.97  # after one that breaks its promise, the next must promise 3 % less
_ALL_SUBSETS = 8  # up to so many budgets every subset is tried, beyond only evenly spaced ones
COSTS = ("flops", "runs")


@dataclass(frozen=True, kw_only=True)
class Choice(Record):
    """The cheapest grid for a wanted width, or the reason why there is none.

    minimised: what was kept small, "flops" or "runs". n_runs, flops: of all runs to train, for
    Δφ both sweeps with the r = 1 runs once. n_candidates: part grids compared. n_simulated:
    those that were simulated.
    """

    target: float
    minimised: str
    grid: Grid | None
    forecast: Forecast | None
    n_runs: int | None
    flops: float | None
    n_candidates: int
    n_simulated: int
    reason: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Every part of a grid that may be chosen, with its cost and its large-sample width.

    Arrays over candidates; `truth` is Δφ when that is wanted, else None.
    """

    grids: tuple[Grid, ...]
    n_runs: NDArray[np.int64]
    flops: NDArray[np.float64]
    widths: NDArray[np.float64]
    family: tuple[Architecture, ...]
    law: JointLaw
    noise: Noise
    delta_phi: float | None

    def simulated(self, index: int, *, n_sets: int, seed: int) -> Forecast:
        """Simulate one candidate."""
        runs = planned_runs(self.grids[index], self.family)
        return simulate(
            runs, self.law, self.noise, delta_phi=self.delta_phi, n_sets=n_sets, seed=seed
        )


def candidates(
    space: Grid,
    family: Sequence[Architecture],
    law: JointLaw,
    noise: Noise,
    *,
    delta_phi: float | None = None,
) -> Candidates:
    """Compare all parts of the grid `space`, itself among them."""
    runs = planned_runs(space, family)
    baseline = Sensitivity.of(runs, law, noise)
    variant = baseline
    if delta_phi is not None:
        variant = Sensitivity.of(runs, replace(law, phi=law.phi + delta_phi), noise)
    unlooped = runs["r"].to_numpy() == 1
    grids = tuple(parts(space))
    if not grids:
        raise ValueError(
            f"recurrences: the grid has r = {space.recurrences[0]} alone, but φ compares at least two. "
            "Add another r."
        )
    widths = np.empty(len(grids))
    for number, grid in enumerate(grids):
        rows = rows_of(grid, runs)
        widths[number] = (
            approximate_width(baseline, rows)
            if delta_phi is None
            else approximate_delta_width(baseline, variant, rows, unlooped)
        )
    costs = [cost(grid, delta_phi) for grid in grids]
    return Candidates(
        grids=grids,
        n_runs=np.array([n for n, _ in costs]),
        flops=np.array([flops for _, flops in costs]),
        widths=widths,
        family=tuple(family),
        law=law,
        noise=noise,
        delta_phi=delta_phi,
    )


def cost(grid: Grid, delta_phi: float | None) -> tuple[int, float]:
    """Count the runs to train and their FLOPs; for Δφ also the variant's runs, of r > 1 alone."""
    if delta_phi is None:
        return grid.n_runs, grid.flops
    looped = [r for r in grid.recurrences if r > 1]
    per_r = grid.n_runs // len(grid.recurrences)
    return grid.n_runs + per_r * len(looped), grid.flops + grid.flops_of(looped)


def cheapest(
    among: Candidates,
    target: float,
    *,
    minimise: str = "flops",
    n_sets: int = 200,
    seed: int = 0,
    known: dict[int, Forecast] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Find the candidate of least cost whose simulated interval is at most `target` wide.

    `known` keeps simulations from one call to the next. Raises ValueError for a width that is not
    positive.
    """
    if not target > 0:
        raise ValueError(
            f"target is {target}, but an interval's width is positive. The paper's is 0.1."
        )
    if minimise not in COSTS:
        raise ValueError(f"minimise is {minimise!r}, but must be {' or '.join(COSTS)}.")
    known = {} if known is None else known
    keys = (among.flops, among.n_runs) if minimise == "flops" else (among.n_runs, among.flops)
    order = np.lexsort(keys[::-1])
    bar, simulated, found = target, 0, None
    for index in (int(index) for index in order):
        if among.widths[index] > bar:
            continue
        if simulated == _MOST_SIMULATED:
            break
        if index not in known:
            say(f"simulating {among.n_runs[index]} runs, {among.flops[index]:.3g} FLOPs")
            known[index] = among.simulated(index, n_sets=n_sets, seed=seed)
        simulated += 1
        if known[index].width <= target:
            found = index
            break
        bar = _STEP * float(among.widths[index])
    return Choice(
        target=target,
        minimised=minimise,
        grid=None if found is None else among.grids[found],
        forecast=None if found is None else known[found],
        n_runs=None if found is None else int(among.n_runs[found]),
        flops=None if found is None else float(among.flops[found]),
        n_candidates=len(among.grids),
        n_simulated=simulated,
        reason=None if found is not None else _why_none(among, simulated),
    )


def _why_none(among: Candidates, simulated: int) -> str:
    """Say why no candidate was found."""
    if simulated:
        return (
            f"the {simulated} cheapest grids that promised as much broke their promise when simulated: ask "
            "for a wider interval, or add budgets, widths or r"
        )
    return (
        f"none of {len(among.grids)} part grids gets there (the narrowest promises "
        f"{float(np.min(among.widths)):.3f}): add budgets, widths or r"
    )


def parts(space: Grid) -> Iterator[Grid]:
    """Yield the candidates of a grid: at least `MIN_CELLS` cells, `MIN_WIDTHS` widths a budget.

    Where the grid itself has fewer, its own numbers are the least.
    """
    first, *others = space.recurrences
    least_cells = min(MIN_CELLS, space.n_cells)
    most = max(len(widths) for widths in space.widths)
    seen: set[tuple[tuple[float, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]] = set()
    for chosen in _subsets(len(space.budgets)):
        for count in range(1, len(others) + 1):
            if len(chosen) * (count + 1) < least_cells:
                continue
            for more in combinations(others, count):
                for n_widths in range(min(MIN_WIDTHS, most), most + 1):
                    budgets = tuple(space.budgets[k] for k in chosen)
                    widths = tuple(_spaced(space.widths[k], n_widths) for k in chosen)
                    key = (budgets, widths, (first, *more))
                    if key not in seen:
                        seen.add(key)
                        yield Grid(budgets=budgets, widths=widths, recurrences=(first, *more))


def rows_of(grid: Grid, runs: pd.DataFrame) -> NDArray[np.int64]:
    """Rows of the whole grid's planned runs that belong to a part of it."""
    keep = np.zeros(len(runs), dtype=bool)
    in_r = np.isin(runs["r"].to_numpy(), grid.recurrences)
    budget, width = runs["budget_flops"].to_numpy(), runs["hidden_size"].to_numpy()
    for one, widths in zip(grid.budgets, grid.widths, strict=True):
        keep |= in_r & (budget == one) & np.isin(width, widths)
    return np.flatnonzero(keep)


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all sets of budgets, or the evenly spaced ones where all would be too many."""
    if count <= _ALL_SUBSETS:
        for size in range(1, count + 1):
            yield from combinations(range(count), size)
        return
    yield from ((at,) for at in range(count))
    for step in range(1, count):
        for at in range(count - step):
            for last in range(at + step, count, step):
                yield tuple(range(at, last + 1, step))


def _spaced(widths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of the widths, evenly spaced, the outer ones included; all where there are fewer."""
    if count >= len(widths):
        return widths
    return tuple(widths[k] for k in np.round(np.linspace(0, len(widths) - 1, count)).astype(int))
