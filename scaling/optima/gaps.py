"""How far looped models trail the unlooped one at equal compute: L*_r(C) − L*_1(C), nats per token.

Three sources of L*: the cells' parabola minima (what the paper's ranges are), the joint law's
frontier, and the frontiers of the architectures' own fits. Source: Schwethelm et al. 2026
(arXiv:2604.21106), section 4.2. Symbols: C budget in FLOPs, r recurrences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..fits.subsets import ArchitectureFit
from ..record import Record
from ..runs.kinds import by_architecture
from ..runs.table import RunTable
from ..solver.laws import JointLaw
from .frontier import Law, architectures, optimum
from .isoflops import isoflops_minima

SOURCES = {
    "parabola": "minima of the cells' parabolas",
    "joint": "frontier of the joint law",
    "own": "frontiers of each architecture's own fit",
}

_Key = tuple[int, float | None]
_Lowest = tuple[float | None, str | None]  # the lowest loss, or the reason why there is none


@dataclass(frozen=True, kw_only=True)
class UnloopedGap(Record):
    """Lowest loss of one architecture minus that of the unlooped one at one budget, nats per token.

    source: one of `SOURCES`. gap: None when one of the two is not determined; `reason` says which and
    why. effective_depth: executed layers of the looped model, None where the table does not say.
    """

    source: str
    budget_flops: float
    r: int
    effective_depth: float | None
    gap: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class GapRange(Record):
    """Smallest and largest gap of one architecture over the budgets, nats; None without any gap.

    n_budgets: budgets with a gap; n_missing: budgets without one.
    """

    source: str
    r: int
    effective_depth: float | None
    low: float | None
    high: float | None
    n_budgets: int
    n_missing: int


def gaps_to_unlooped(
    table: RunTable, law: JointLaw | None = None, own: Sequence[ArchitectureFit] = ()
) -> tuple[UnloopedGap, ...]:
    """Gap to r = 1 of every looped architecture at every budget, from each source.

    By source, then budget, then r. Without `law` or `own` (`subsets.per_architecture`) these sources
    are left out. The partner is the unlooped model of the same effective depth, or the
    table's only one. Empty for a table without budgets.
    """
    keys = [(r, depth) for r, depth, _ in by_architecture(table.runs)]
    budgets = table.budgets()
    out = _gaps("parabola", keys, budgets, _parabolas(table))
    if law is not None:
        out += _gaps("joint", keys, budgets, _frontiers(table, dict.fromkeys(keys, law)))
    if own:
        laws = {(one.r, one.effective_depth): one.fit.law for one in own if one.fit is not None}
        refused = {(one.r, one.effective_depth): one.reason for one in own if one.fit is None}
        lowest = _frontiers(table, laws)
        lowest |= {(c, key): (None, why) for c in budgets for key, why in refused.items()}
        out += _gaps("own", keys, budgets, lowest)
    return tuple(out)


def gap_ranges(gaps: Iterable[UnloopedGap]) -> tuple[GapRange, ...]:
    """Range over the budgets of every source and architecture, in the order of the gaps."""
    groups: dict[tuple[str, int, float | None], list[float | None]] = {}
    for one in gaps:
        groups.setdefault((one.source, one.r, one.effective_depth), []).append(one.gap)
    out = []
    for (source, r, depth), values in groups.items():
        known = [value for value in values if value is not None]
        out.append(
            GapRange(
                source=source,
                r=r,
                effective_depth=depth,
                low=min(known, default=None),
                high=max(known, default=None),
                n_budgets=len(known),
                n_missing=len(values) - len(known),
            )
        )
    return tuple(out)


def _parabolas(table: RunTable) -> dict[tuple[float, _Key], _Lowest]:
    return {
        (one.budget_flops, (one.r, one.effective_depth)): (one.loss, one.reason)
        for one in isoflops_minima(table.runs)
    }


def _frontiers(table: RunTable, laws: Mapping[_Key, Law]) -> dict[tuple[float, _Key], _Lowest]:
    """Lowest loss of every architecture that has a law, at every budget of the table."""
    found, reasons = architectures(table.runs)
    by_key = {(one.r, one.effective_depth): one for one in found}
    out: dict[tuple[float, _Key], _Lowest] = {}
    for budget in table.budgets():
        for key, law in laws.items():
            if key not in by_key:
                out[budget, key] = (None, reasons[key[0]])
                continue
            point = optimum(law, by_key[key], budget)
            out[budget, key] = (point.loss, point.reason)
    return out


def _gaps(
    source: str,
    keys: list[_Key],
    budgets: list[float],
    lowest: dict[tuple[float, _Key], _Lowest],
) -> list[UnloopedGap]:
    absent: _Lowest = (None, "no runs at this budget")
    out = []
    for budget in budgets:
        for key in keys:
            if key[0] == 1:
                continue
            base = _partner(key, keys)
            looped = lowest.get((budget, key), absent)
            unlooped = (
                (None, "the table has no unlooped model of this effective depth")
                if base is None
                else lowest.get((budget, base), absent)
            )
            out.append(_gap(source, budget, key, looped, unlooped))
    return out


def _partner(key: _Key, keys: list[_Key]) -> _Key | None:
    unlooped = [other for other in keys if other[0] == 1]
    if (1, key[1]) in unlooped:
        return 1, key[1]
    return unlooped[0] if len(unlooped) == 1 else None


def _gap(source: str, budget: float, key: _Key, looped: _Lowest, unlooped: _Lowest) -> UnloopedGap:
    gap: float | None = None
    reason: str | None = None
    if looped[0] is None:
        reason = f"r = {key[0]}: {looped[1]}"
    elif unlooped[0] is None:
        reason = f"r = 1: {unlooped[1]}"
    else:
        gap = looped[0] - unlooped[0]
    return UnloopedGap(
        source=source,
        budget_flops=budget,
        r=key[0],
        effective_depth=key[1],
        gap=gap,
        reason=reason,
    )
