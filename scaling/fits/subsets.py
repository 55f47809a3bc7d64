"""Fits to parts of a table: each architecture alone, halves of the budgets, one r left out, each depth.

The split of N into N_once and N_rec stays that of the whole table (`table.RunTable.where`). A part
that cannot identify the law keeps the refusal as its reason. Source: Schwethelm et al. 2026
(arXiv:2604.21106), tables 1 and 3, appendices G.3 and G.4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..record import Record
from ..runs.kinds import by_architecture, effective_depths
from ..runs.table import RunTable
from ..solver.solve import RANDOM_STARTS
from .fit import ChinchillaFit, Fit, JointFit, fit_chinchilla, fit_joint

DELTA = 1e-3
F = TypeVar("F", bound=Fit)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArchitectureFit(Record):
    """Chinchilla's law fitted to one architecture's runs, N being its own n_once + n_rec.

    effective_depth: executed layers, None where the table does not say. fit: None when these runs
    cannot identify the law; `reason` says why.
    """

    r: int
    effective_depth: float | None
    n_runs: int
    fit: ChinchillaFit | None
    reason: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class SubsetFit(Record):
    """The joint law fitted to a part of a table.

    name: which runs, in words. fit: None when they cannot identify the law; `reason` says why.
    """

    name: str
    n_runs: int
    fit: JointFit | None
    reason: str | None

    @property
    def phi(self) -> float | None:
        """The part's exponent."""
        return None if self.fit is None else self.fit.law.phi


def per_architecture(
    table: RunTable, *, delta: float = DELTA, n_starts: int = RANDOM_STARTS
) -> tuple[ArchitectureFit, ...]:
    """Fit L = E + A·N^−α + B·D^−β (eq. 2) to every architecture of the table (table 1).

    By r, then effective depth.
    """
    out = []
    for r, depth, group in by_architecture(table.runs):
        part = table.where(table.runs.index.isin(group.index))
        fit, reason = _tried(fit_chinchilla, part, delta, n_starts)
        out.append(
            ArchitectureFit(r=r, effective_depth=depth, n_runs=len(part), fit=fit, reason=reason)
        )
    return tuple(out)


def budget_halves(
    table: RunTable, *, delta: float = DELTA, n_starts: int = RANDOM_STARTS
) -> tuple[SubsetFit, ...]:
    """Fit the joint law to the lower and to the upper half of the budgets (appendix G.3).

    Of an odd number of budgets the middle one goes with the lower half. Empty with fewer than two.
    """
    budgets = table.budgets()
    if len(budgets) < 2:
        return ()
    last = budgets[(len(budgets) - 1) // 2]
    first = budgets[(len(budgets) + 1) // 2]
    c = table.runs["budget_flops"].to_numpy(dtype=float)
    parts = {f"C ≤ {last:g}": c <= last, f"C ≥ {first:g}": c >= first}
    return _joint(table, parts, delta, n_starts)


def lowest_budgets(
    table: RunTable, count: int = 4, *, delta: float = DELTA, n_starts: int = RANDOM_STARTS
) -> SubsetFit:
    """Fit the joint law to the `count` lowest budgets (table 3: the four that case studies have).

    Raises ValueError when the table has no more budgets than that.
    """
    budgets = table.budgets()
    if not 1 <= count < len(budgets):
        raise ValueError(
            f"count is {count}, but must be from 1 to {len(budgets) - 1}: {table.source} has "
            f"{len(budgets)} budgets. Fit the whole table for all of them."
        )
    keep = table.runs["budget_flops"].to_numpy(dtype=float) <= budgets[count - 1]
    name = f"{count} lowest budgets, C ≤ {budgets[count - 1]:g}"
    return _joint(table, {name: keep}, delta, n_starts)[0]


def without_each_r(
    table: RunTable, *, delta: float = DELTA, n_starts: int = RANDOM_STARTS
) -> tuple[SubsetFit, ...]:
    """Fit the joint law once without each r, by r."""
    r = table.runs["r"].to_numpy()
    parts = {f"without r = {value}": r != value for value in np.unique(r)}
    return _joint(table, parts, delta, n_starts)


def pooled_depths(
    table: RunTable, *, delta: float = DELTA, n_starts: int = RANDOM_STARTS
) -> tuple[SubsetFit, ...]:
    """Fit the joint law to all effective depths together, then to each alone (appendix G.4).

    Under the regression split N_once and N_rec belong to each (width, depth). Empty for a table
    whose runs at one width and r share one depth.
    """
    depths = effective_depths(table.runs)
    if len(depths) < 2:
        return ()
    depth = table.runs["effective_depth"].to_numpy(dtype=float)
    together = f"effective depths {', '.join(f'{value:g}' for value in depths)}"
    parts = {together: np.isin(depth, depths)}
    parts |= {f"effective depth {value:g}": depth == value for value in depths}
    return _joint(table, parts, delta, n_starts)


def _joint(
    table: RunTable, parts: dict[str, NDArray[np.bool_]], delta: float, n_starts: int
) -> tuple[SubsetFit, ...]:
    out = []
    for name, keep in parts.items():
        part = table.where(keep)
        fit, reason = _tried(fit_joint, part, delta, n_starts)
        out.append(SubsetFit(name=name, n_runs=len(part), fit=fit, reason=reason))
    return tuple(out)


def _tried(
    fit: Callable[..., F], part: RunTable, delta: float, n_starts: int
) -> tuple[F | None, str | None]:
    """Fit a part, or return the refusal of a design that cannot identify the law."""
    if not len(part):
        return None, "no runs are left"
    try:
        return fit(part, delta=delta, n_starts=n_starts), None
    except ValueError as error:
        return None, str(error)
