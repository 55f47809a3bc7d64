"""Δφ: what a variant of the loop does to the worth of a recurrence.

Both tables are refitted on the budgets they share, with the baseline's r = 1 runs reused; the
difference comes with an interval, the probability of its sign and what it means for capacity, tokens,
the compute-optimal width and the cost of serving. Source: Schwethelm et al. 2026 (arXiv:2604.21106),
section 5 and appendix H.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ..fits.bootstrap import RESAMPLES
from ..fits.looseness import loose_warnings
from ..record import plain
from ..runs.table import RunTable
from ..solver.laws import JointLaw
from ..solver.solve import RANDOM_STARTS
from .consequences import Consequences, consequences
from .difference import Difference, Refitted, difference
from .observed import Observed, observed
from .pairing import Pair, cells, pair_up
from .verdict import FEW_CELLS, verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison(Difference):
    """Δφ (see `Difference`) with the budgets, laws and consequences behind it.

    verdict: sentences computed from the numbers; "Cannot tell" when they do not say. budgets: the
    shared ones, FLOPs. n_reused: r = 1 runs of the baseline that stand in the variant's fit.
    shared_cells: the same on the (budget, r) cells that both tables hold, None where these are all
    or cannot be fitted. notes: what was reused and what to beware of, sentences.
    """

    verdict: str
    split: str
    loss: str
    delta: float
    source_baseline: str
    source_variant: str
    budgets: tuple[float, ...]
    r_baseline: tuple[int, ...]
    r_variant: tuple[int, ...]
    n_runs_baseline: int
    n_runs_variant: int
    n_reused: int
    law_baseline: JointLaw
    law_variant: JointLaw
    r2_baseline: float
    r2_variant: float
    shared_cells: Difference | None
    observed: tuple[Observed, ...]
    meaning: Consequences
    notes: tuple[str, ...]


def compare(
    baseline: RunTable,
    variant: RunTable,
    *,
    delta: float = 1e-3,
    resamples: int = RESAMPLES,
    seed: int = 0,
    n_starts: int = RANDOM_STARTS,
) -> Comparison:
    """Compare the worth of a recurrence in two tables of finished runs.

    The draws of cells are the same for both tables where their (budget, r) cells match, independent
    otherwise. `delta` as in `fit.fit_joint`. Raises ValueError for tables that cannot be compared
    (`pairing.pair_up`) or fitted.
    """
    if resamples < 2:
        raise ValueError(
            f"resamples is {resamples}, but percentiles need at least 2; the paper draws 200."
        )
    pair = pair_up(baseline, variant)
    refit = partial(difference, delta=delta, resamples=resamples, seed=seed, n_starts=n_starts)
    value, refitted = refit(pair)
    common, why_not = _on_shared_cells(pair, refit)
    meaning = consequences(pair, *refitted.laws)
    first, second = refitted.fits
    return Comparison(
        **{field.name: getattr(value, field.name) for field in fields(value)},
        verdict=verdict(value, common, meaning, identical=pair.identical),
        split=pair.baseline.split,
        loss=pair.baseline.loss,
        delta=delta,
        source_baseline=baseline.source,
        source_variant=variant.source,
        budgets=pair.budgets,
        r_baseline=tuple(row.r for row in first.residuals),
        r_variant=tuple(row.r for row in second.residuals),
        n_runs_baseline=first.n_runs,
        n_runs_variant=second.n_runs,
        n_reused=pair.n_reused,
        law_baseline=first.law,
        law_variant=second.law,
        r2_baseline=first.r2,
        r2_variant=second.r2,
        shared_cells=common,
        observed=observed(pair),
        meaning=meaning,
        notes=(*pair.notes, *why_not, *_warnings(value, refitted)),
    )


def _on_shared_cells(
    pair: Pair, refit: Callable[[Pair], tuple[Difference, Refitted]]
) -> tuple[Difference | None, list[str]]:
    """Δφ on the cells that both tables hold, where these are not all, or why there is none."""
    if pair.cells_match:
        return None, []
    shared = pair.on_shared_cells()
    if not any(r > 1 for _, r in cells(shared.baseline.runs)):
        return None, [
            "the tables share no looped r: Δφ compares different architectures and rests on the form "
            "r^φ alone"
        ]
    try:
        value, _ = refit(shared)
    except ValueError as error:
        return None, [f"no fit on the cells that both tables hold: {error}"]
    return value, []


def _warnings(value: Difference, refitted: Refitted) -> list[str]:
    out = []
    for name, fit in zip(("baseline", "variant"), refitted.fits, strict=True):
        if fit.at_bound:
            out.append(
                f"{', '.join(fit.at_bound)} of the {name} stopped on a bound of the search: its runs do "
                "not determine it"
            )
        out += [f"{name}: {text.rstrip('.')}" for text in loose_warnings(fit)]
        looped = [row.r for row in fit.residuals if row.r > 1]
        if len(looped) == 1:
            out.append(
                f"φ of the {name} rests on one looped r, {looped[0]}: its form is not tested"
            )
    if min(value.n_cells) < FEW_CELLS and value.delta_phi_ci is not None:
        out.append(
            f"{min(value.n_cells)} (budget, r) cells: percentiles of so few blocks are rough, add "
            "budgets or r"
        )
    if value.n_redrawn > 0.05 * value.n_resamples and value.delta_phi_ci is not None:
        out.append(
            f"{value.n_redrawn} resamples had lost an r or a budget and were drawn again: the interval "
            "is optimistic"
        )
    return out


_TOP = ("delta_phi", "delta_phi_ci", "phi_baseline", "phi_variant", "p_positive", "verdict")


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain JSON values: Δφ, its interval, both φ, probability and verdict first, then the details."""
    value = plain(comparison)
    rest = {key: item for key, item in value.items() if key not in (*_TOP, "draws")}
    if rest["shared_cells"] is not None:
        rest["shared_cells"].pop("draws")
    return {**{key: value[key] for key in _TOP}, **rest}
