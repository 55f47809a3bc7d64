"""Everything the paper reports beside φ, from one table in one call.

Fits of parts, exponents of the frontier, gaps to r = 1, equivalent sizes, and the largest budget
predicted from the others. Every part is a function of its own module. Source: Schwethelm et al.
2026 (arXiv:2604.21106), section 4 and appendix G.
"""

from dataclasses import dataclass

from ..fits.fit import JointFit
from ..fits.subsets import (
    ArchitectureFit,
    SubsetFit,
    budget_halves,
    lowest_budgets,
    per_architecture,
    pooled_depths,
    without_each_r,
)
from ..optima.exponents import Exponents, frontier_exponents
from ..optima.frontier import architectures
from ..optima.gaps import GapRange, UnloopedGap, gap_ranges, gaps_to_unlooped
from ..optima.predict import HeldOut, held_out
from ..optima.sizes import EquivalentSize, equivalent_size
from ..record import Record

CASE_STUDY_BUDGETS = 4  # the paper's case studies have the four lowest of six
EXAMPLE_SIZE = 1e9  # parameters of the unlooped model in the paper's example of equivalent sizes
STARTS = 100  # random starts of each part, beside the exponent grid


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings(Record):
    """What a table says beside φ. A part that could not be computed holds its own reason.

    own: every architecture alone. halves, without_r, depths: the joint law on parts. lowest: on the
    four lowest budgets, None with four or fewer. exponents_own, exponents_joint: growth of the
    compute-optimal model. gaps, ranges: to r = 1. sizes: looped models as wide as an unlooped
    one of `EXAMPLE_SIZE` parameters; empty without unlooped runs. held_out: the largest budget
    predicted from the others, None with fewer than two.
    """

    own: tuple[ArchitectureFit, ...]
    halves: tuple[SubsetFit, ...]
    lowest: SubsetFit | None
    without_r: tuple[SubsetFit, ...]
    depths: tuple[SubsetFit, ...]
    exponents_own: tuple[Exponents, ...]
    exponents_joint: tuple[Exponents, ...]
    gaps: tuple[UnloopedGap, ...]
    ranges: tuple[GapRange, ...]
    sizes: tuple[EquivalentSize, ...]
    held_out: HeldOut | None


def findings(fit: JointFit, *, n_starts: int = STARTS) -> Findings:
    """Compute every part from the joint fit of a table, with its split and its Huber δ."""
    table, delta = fit.table, fit.delta
    budgets = table.budgets()
    own = per_architecture(table, delta=delta, n_starts=n_starts)
    gaps = gaps_to_unlooped(table, fit.law, own)
    lowest = None
    if len(budgets) > CASE_STUDY_BUDGETS:
        lowest = lowest_budgets(table, CASE_STUDY_BUDGETS, delta=delta, n_starts=n_starts)
    last = None
    if len(budgets) > 1:
        out = table.runs["budget_flops"].to_numpy(dtype=float) == budgets[-1]
        last = held_out(table, out, delta=delta, n_starts=n_starts)
    return Findings(
        own=own,
        halves=budget_halves(table, delta=delta, n_starts=n_starts),
        lowest=lowest,
        without_r=without_each_r(table, delta=delta, n_starts=n_starts),
        depths=pooled_depths(table, delta=delta, n_starts=n_starts),
        exponents_own=frontier_exponents(table, own),
        exponents_joint=frontier_exponents(table, fit.law),
        gaps=gaps,
        ranges=gap_ranges(gaps),
        sizes=_sizes(fit),
        held_out=last,
    )


def _sizes(fit: JointFit) -> tuple[EquivalentSize, ...]:
    """Looped architectures at the width of an unlooped model of `EXAMPLE_SIZE` parameters."""
    found, _ = architectures(fit.runs)
    unlooped = {one.effective_depth for one in found if one.r == 1}
    return tuple(
        equivalent_size(
            fit.law,
            found,
            one.r,
            n_unlooped=EXAMPLE_SIZE,
            effective_depth=one.effective_depth,
        )
        for one in found
        if one.r > 1 and one.effective_depth in unlooped
    )
