"""Everything the report says about one table.

Free and restricted fits, intervals, minima, frontier, seeds, warnings.

Symbols follow Schwethelm et al. 2026 (arXiv:2604.21106).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..fits.bootstrap import RESAMPLES, PhiInterval, bootstrap
from ..fits.fit import JointFit, fit_joint
from ..fits.looseness import loose_direction, loose_warnings
from ..fits.profile import PhiProfile, profile_phi
from ..optima.frontier import Architecture, architectures, frontier
from ..optima.isoflops import IsoFlopsMinimum, isoflops_minima
from ..record import plain
from ..runs.seeds import Gap, SeedSpread, gaps_between_r, seed_spread
from ..runs.split import SPLITS
from ..runs.table import RunTable, as_table

WIDE_INTERVAL = 0.3  # width of the interval of φ above which the report warns
OFF_BUDGET = 0.2  # of compute spent against compute planned
FEW_CELLS = 10
_RESTRICTED_STARTS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """The fit of one table with everything around it; `as_json` gives the machine-readable form.

    restricted: the fits with φ held at 0 and at 1, where the design allows them. frontier_reasons:
    r → why it has no frontier. warnings: sentences.
    """

    fit: JointFit
    interval: PhiInterval
    profile: PhiProfile
    restricted: dict[int, JointFit]
    minima: tuple[IsoFlopsMinimum, ...]
    architectures: tuple[Architecture, ...]
    frontier_reasons: dict[int, str]
    seeds: SeedSpread | None
    gaps: tuple[Gap, ...]
    warnings: tuple[str, ...]

    @property
    def phi(self) -> float:
        """The fitted exponent."""
        return self.fit.law.phi

    @property
    def phi_ci(self) -> tuple[float, float] | None:
        """95 % interval of φ, None when unavailable."""
        if self.interval.low is None or self.interval.high is None:
            return None
        return self.interval.low, self.interval.high

    def budgets(self) -> list[float]:
        """List the table's compute budgets, FLOPs, ascending; empty when it has none."""
        return self.fit.table.budgets()


def analyse(
    data: RunTable | pd.DataFrame,
    *,
    delta: float = 1e-3,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Analysis:
    """Fit the table freely and with φ = 0 and φ = 1, bootstrap φ, and collect what a report needs.

    Arguments as in `fit.fit_joint` and `bootstrap.bootstrap`. Raises ValueError for a bad table or
    a design that cannot identify φ.
    """
    table = as_table(data)
    fit = fit_joint(table, delta=delta)
    restricted, refusals = _restricted(table, delta)
    interval = bootstrap(fit, resamples=resamples, seed=seed)
    found, reasons = architectures(fit.runs)
    seeds, gaps = seed_spread(fit.runs), gaps_between_r(fit.runs)
    return Analysis(
        fit=fit,
        interval=interval,
        profile=profile_phi(fit),
        restricted=restricted,
        minima=isoflops_minima(fit.runs),
        architectures=found,
        frontier_reasons=reasons,
        seeds=seeds,
        gaps=gaps,
        warnings=(
            *_fit_warnings(fit),
            *_compute_warnings(fit.runs),
            *refusals,
            *_interval_warnings(fit, interval),
            *_seed_warnings(seeds, gaps),
        ),
    )


def _restricted(table: RunTable, delta: float) -> tuple[dict[int, JointFit], list[str]]:
    """Fit with φ held at 0 and at 1; a value that the design cannot take becomes a warning.

    At φ = 1 iso-FLOPs architectures coincide, so that few widths and budgets leave too few points.
    """
    fits: dict[int, JointFit] = {}
    refusals = []
    for phi in (0, 1):
        try:
            fits[phi] = fit_joint(table, phi=float(phi), delta=delta, n_starts=_RESTRICTED_STARTS)
        except ValueError as error:
            refusals.append(f"no fit with φ = {phi}: {error}")
    return fits, refusals


def _fit_warnings(fit: JointFit) -> list[str]:
    out = []
    if fit.at_bound:
        out.append(
            f"{', '.join(fit.at_bound)} stopped on a bound of the search (E: numerically zero; α, "
            "β: 0.001 or 3; φ: ±3): "
            "the runs do not determine it, and the other parameters depend on where the bound lies."
        )
    if fit.n_runs < 12:
        out.append(f"{fit.n_runs} runs for 6 parameters: R² and RMSE flatter the law.")
    if fit.n_at_best < 3:
        out.append(
            f"only {fit.n_at_best} of {fit.n_starts} starts reached the best objective: it may not "
            "be the lowest."
        )
    if not 0 <= fit.law.phi <= 1:
        meaning = (
            "recurrences would make the shared block worse"
            if fit.law.phi < 0
            else "more than a layer of its own"
        )
        out.append(
            f"φ = {fit.law.phi:.3f} lies outside [0, 1] ({meaning}): look for noise or tuning that "
            "differs between r."
        )
    return out + loose_warnings(fit)


def _compute_warnings(runs: pd.DataFrame) -> list[str]:
    """Name the run whose tokens and FLOPs per token are furthest from its budget."""
    if not {"budget_flops", "train_flops_per_token"} <= set(runs):
        return []
    spent, planned = runs["tokens"] * runs["train_flops_per_token"], runs["budget_flops"]
    ratio = (spent / planned).to_numpy(dtype=float)
    off = np.abs(np.log(ratio))
    n_off = int(np.sum(off > np.log1p(OFF_BUDGET)))
    if n_off == 0:
        return []
    worst = int(np.nanargmax(off))
    return [
        f"{n_off} {'run spends' if n_off == 1 else 'runs spend'} more than {OFF_BUDGET:.0%} off budget: "
        f"tokens × train_flops_per_token of run {runs['run_id'].iloc[worst]} is {ratio[worst]:.3g} × its "
        "budget_flops. Check these three columns."
    ]


def _interval_warnings(fit: JointFit, interval: PhiInterval) -> list[str]:
    if interval.low is None or interval.high is None:
        return [f"no interval for φ: {interval.reason}."]
    out = []
    if interval.high - interval.low > WIDE_INTERVAL:
        out.append(
            f"the interval of φ is {interval.high - interval.low:.2f} wide: the table says little "
            "about φ."
        )
    if interval.low <= 0 <= interval.high:
        out.append(
            "the interval of φ covers 0: recurrences that add nothing are compatible with these "
            "runs."
        )
    if interval.low <= 1 <= interval.high:
        out.append(
            "the interval of φ covers 1: recurrences as good as layers of their own are compatible "
            "with these runs."
        )
    if interval.n_cells < FEW_CELLS:
        out.append(
            f"{interval.n_cells} (budget, r) cells: percentiles of so few blocks are rough; add "
            "budgets or r."
        )
    if interval.n_redrawn > 0.05 * interval.n_resamples:
        out.append(
            f"{interval.n_redrawn} resamples had lost an r or a budget and were drawn again: the "
            "interval is optimistic."
        )
    if interval.n_at_bound:
        out.append(
            f"{interval.n_at_bound} of {interval.n_resamples} resamples stopped on the bound φ = "
            "±3."
        )
    if not interval.low <= fit.law.phi <= interval.high:
        out.append("φ of all runs lies outside its own interval: a few cells dominate the fit.")
    return out


def _seed_warnings(seeds: SeedSpread | None, gaps: tuple[Gap, ...]) -> list[str]:
    if seeds is None or not gaps:
        return []
    typical = float(np.mean([abs(gap.gap) for gap in gaps]))
    if typical <= seeds.sd:
        return [
            f"neighbouring r differ by {typical:.4f} nats on average, no more than one run varies "
            "over seeds "
            f"({seeds.sd:.4f}): φ is mostly noise."
        ]
    return []


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Plain JSON values: phi, phi_ci, α, β, E, A, B, r2, rmse, split, n_runs at the top, details below."""
    fit, interval = analysis.fit, analysis.interval
    budgets = np.array(analysis.budgets())
    points = frontier(fit.law, analysis.architectures, budgets) if len(budgets) else pd.DataFrame()
    value = {
        **_numbers(fit),
        "phi_ci": list(analysis.phi_ci) if analysis.phi_ci else None,
        "profile": asdict(analysis.profile),
        "split": fit.split,
        "split_meaning": SPLITS[fit.split],
        "loss": fit.loss,
        "loss_unit": fit.loss_unit,
        "source": fit.source,
        "n_runs": fit.n_runs,
        "n_left_out": fit.n_left_out,
        "delta": fit.delta,
        "interval": {
            name: getattr(interval, name)
            for name in ("n_resamples", "n_cells", "n_redrawn", "n_at_bound", "seed", "reason")
        },
        "restricted": {f"phi={phi}": _numbers(other) for phi, other in analysis.restricted.items()},
        "loosest_direction": asdict(loose_direction(fit)),
        "residuals": [asdict(row) for row in fit.residuals],
        "isoflops": [asdict(minimum) for minimum in analysis.minima],
        "frontier": points.to_dict("records"),
        "frontier_unavailable": {str(r): reason for r, reason in analysis.frontier_reasons.items()},
        "seed_spread": asdict(analysis.seeds) if analysis.seeds else None,
        "gaps_between_r": [{**asdict(gap), "gap": gap.gap} for gap in analysis.gaps],
        "warnings": list(analysis.warnings),
    }
    return {str(key): plain(item) for key, item in value.items()}


def _numbers(fit: JointFit) -> dict[str, Any]:
    law = fit.law
    return {
        "phi": law.phi,
        "alpha": law.alpha,
        "beta": law.beta,
        "E": law.E,
        "A": law.A,
        "B": law.B,
        "r2": fit.r2,
        "rmse": fit.rmse,
        "objective": fit.objective,
        "n_starts": fit.n_starts,
        "n_at_best": fit.n_at_best,
        "condition": fit.condition,
        "at_bound": list(fit.at_bound),
    }
