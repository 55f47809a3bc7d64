"""φ per task axis: the joint law fitted to loss/<axis> columns, and when such a fit says nothing.

An axis is "too noisy" (Schwethelm et al. 2026, arXiv:2604.21106, appendix I) when a rule of `Thresholds`
fails: then its φ is None and `reason` names every rule that failed. Symbols: r recurrences, N
parameters (count), losses in nats per token; sd: standard deviation, n − 1 in the denominator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..fits.bootstrap import RESAMPLES, PhiInterval, bootstrap
from ..fits.fit import JointFit, fit_joint
from ..record import Record
from ..runs import is_finished
from ..runs.checks import refuse_bad_runs
from ..runs.seeds import SeedSpread, seed_spread
from ..runs.table import RunTable
from ..solver.solve import RANDOM_STARTS

PREFIX = "loss/"
_OF_N = ("A", "alpha", "phi")  # the term in N_eff; on a bound it leaves φ loose


@dataclass(frozen=True, kw_only=True)
class Thresholds(Record):
    """When an axis admits a φ.

    max_width: of its 95 % interval; half the way from φ = 0 to φ = 1. max_seed_share: largest sd of
    one setting over seeds as a share of the sd between the r of one budget; at 0.5 a quarter of the
    variance between r is noise.
    """

    max_width: float = 0.5
    max_seed_share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse thresholds that nothing or everything passes."""
        for name in ("max_width", "max_seed_share"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(
                    f"{name} is {value}, but a threshold must be positive and finite. The default "
                    f"is {getattr(Thresholds, name)}."
                )


THRESHOLDS = Thresholds()


@dataclass(frozen=True, kw_only=True)
class SeedMean(Record):
    """Loss of one setting (budget, r, N, tokens) over its seeds: mean and sd, nats per token."""

    budget_flops: float | None
    r: int
    n: float
    tokens: float
    n_seeds: int
    mean: float
    sd: float


@dataclass(frozen=True, kw_only=True)
class SeedPhis(Record):
    """φ of each seed's runs alone, by seed, with mean and sd; None where a seed has no fit (`reason`)."""

    seeds: tuple[float, ...]
    phis: tuple[float, ...]
    mean: float | None
    sd: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisFit(Record):
    """One axis: φ with its interval, or None with the reason.

    fit: of all runs, kept when the axis is too noisy; None when the design identifies no law.
    missing: finished runs without a loss on this axis, left out. settings: every setting that was run
    with several seeds. spread: pooled sd of one run over seeds. between: pooled sd between the r of a
    budget, each r at its best width, mean over seeds. by_seed: None when the table has one seed.
    """

    axis: str
    phi: float | None
    phi_ci: tuple[float, float] | None
    reason: str | None
    n_runs: int
    missing: tuple[str, ...]
    fit: JointFit | None
    interval: PhiInterval | None
    settings: tuple[SeedMean, ...]
    spread: SeedSpread | None
    between: float | None
    by_seed: SeedPhis | None
    thresholds: Thresholds = field(default=THRESHOLDS)

    @property
    def seed_share(self) -> float | None:
        """Spread over seeds as a share of that between r, None when either is unknown."""
        return _share(self.spread, self.between)


def loss_columns(frame: pd.DataFrame) -> tuple[str, ...]:
    """Names of the table's loss/<axis> and loss/<task> columns, in their order."""
    return tuple(str(name) for name in frame.columns if str(name).startswith(PREFIX))


def axis_fits(
    frame: pd.DataFrame,
    columns: Sequence[str] | None = None,
    *,
    split: str = "text",
    delta: float = 1e-3,
    resamples: int = RESAMPLES,
    seed: int = 0,
    n_starts: int = RANDOM_STARTS,
    thresholds: Thresholds = THRESHOLDS,
) -> tuple[AxisFit, ...]:
    """Fit every loss/… column of a run table, or those in `columns`; see `axis_fit`."""
    names = loss_columns(frame) if columns is None else tuple(columns)
    return tuple(
        axis_fit(
            frame,
            name,
            split=split,
            delta=delta,
            resamples=resamples,
            seed=seed,
            n_starts=n_starts,
            thresholds=thresholds,
        )
        for name in names
    )


def axis_fit(
    frame: pd.DataFrame,
    column: str,
    *,
    split: str = "text",
    delta: float = 1e-3,
    resamples: int = RESAMPLES,
    seed: int = 0,
    n_starts: int = RANDOM_STARTS,
    thresholds: Thresholds = THRESHOLDS,
) -> AxisFit:
    """Fit the joint law to one column; finished runs without a value there are left out and named.

    The split is taken over the runs that have a value. Raises ValueError for a bad table or an
    unknown column; a design that identifies no law is a reason, not an error.
    """
    if column not in frame:
        known = ", ".join(loss_columns(frame)) or "none"
        raise ValueError(
            f"{frame.attrs.get('source', 'the run table')}: column {column} is missing (columns "
            f"{PREFIX}…: {known}). Choose one of them, or evaluate the runs first."
        )
    part, missing = with_value(frame, column)
    if missing and not is_finished(part).any():
        return _refused(column, f"no finished run has a value of {column}", missing, thresholds)
    try:
        table = RunTable.of(part, split=split, loss=column)
    except ValueError as error:
        refuse_bad_runs(part, loss=column)
        if not missing:
            raise
        return _refused(
            column, f"no split over the runs with a value: {error}", missing, thresholds
        )
    spread, between = seed_spread(table.runs), between_r(table.runs)
    try:
        fit = fit_joint(table, delta=delta, n_starts=n_starts)
    except ValueError as error:
        return _refused(column, str(error), missing, thresholds, table)
    interval = bootstrap(fit, resamples=resamples, seed=seed)
    reasons = against(fit, interval, _share(spread, between), thresholds)
    return AxisFit(
        axis=column,
        phi=None if reasons else fit.law.phi,
        phi_ci=None if reasons else _ends(interval),
        reason="; ".join(reasons) or None,
        n_runs=len(table),
        missing=missing,
        fit=fit,
        interval=interval,
        settings=seed_means(table.runs),
        spread=spread,
        between=between,
        by_seed=phi_by_seed(table, delta=delta, n_starts=n_starts),
        thresholds=thresholds,
    )


def against(
    fit: JointFit, interval: PhiInterval, seed_share: float | None, thresholds: Thresholds
) -> list[str]:
    """Say every rule by which a fit says nothing about φ; empty when it passes all."""
    out = []
    loose = [name for name in fit.at_bound if name in _OF_N]
    if loose:
        out.append(f"{', '.join(loose)} stopped on a bound of the search: nothing holds φ")
    ends = _ends(interval)
    if ends is None:
        out.append(f"no interval to tell φ from noise: {interval.reason}")
    elif ends[1] - ends[0] > thresholds.max_width:
        out.append(
            f"the 95 % interval of φ, [{ends[0]:.2f}, {ends[1]:.2f}], is {ends[1] - ends[0]:.2f} "
            f"wide, above {thresholds.max_width:g}"
        )
    if seed_share is not None and seed_share > thresholds.max_seed_share:
        out.append(
            f"one run varies over seeds by {seed_share:.2f} of the spread between the r of a "
            f"budget, above {thresholds.max_seed_share:g}"
        )
    return out


def between_r(runs: pd.DataFrame) -> float | None:
    """Pooled sd between the r of one budget, nats; None without a budget that has two r.

    Each r by its smallest loss over widths, mean over seeds first.
    """
    if "budget_flops" not in runs:
        return None
    settings = runs.groupby(["budget_flops", "r", "n", "tokens"])["loss"].mean()
    best = settings.groupby(level=["budget_flops", "r"]).min().groupby(level="budget_flops")
    degrees = best.count() - 1
    if degrees.sum() == 0:
        return None
    return float(np.sqrt((best.var().fillna(0.0) * degrees).sum() / degrees.sum()))


def seed_means(runs: pd.DataFrame) -> tuple[SeedMean, ...]:
    """Mean and sd over seeds of every setting that was run more than once, by budget, r and N."""
    budget = runs["budget_flops"] if "budget_flops" in runs else pd.Series(np.nan, runs.index)
    keyed = runs.assign(budget_flops=budget)
    out = []
    for _, group in keyed.groupby(["budget_flops", "r", "n", "tokens"], dropna=False, sort=True):
        if len(group) > 1:
            first = group.iloc[0]
            known = pd.notna(first["budget_flops"])
            out.append(
                SeedMean(
                    budget_flops=float(first["budget_flops"]) if known else None,
                    r=int(first["r"]),
                    n=float(first["n"]),
                    tokens=float(first["tokens"]),
                    n_seeds=len(group),
                    mean=float(group["loss"].mean()),
                    sd=float(group["loss"].std()),
                )
            )
    return tuple(out)


def phi_by_seed(
    table: RunTable, *, delta: float = 1e-3, n_starts: int = RANDOM_STARTS
) -> SeedPhis | None:
    """Refit each seed's runs alone; None when the table does not have two seeds."""
    if "seed" not in table.runs or table.runs["seed"].nunique() < 2:
        return None
    seeds = tuple(float(value) for value in np.unique(table.runs["seed"].dropna()))
    unnamed = int(table.runs["seed"].isna().sum())
    if unnamed:
        return SeedPhis(
            seeds=seeds, phis=(), mean=None, sd=None, reason=f"{unnamed} runs have no seed"
        )
    phis = []
    for value in seeds:
        part = table.where(table.runs["seed"] == value)
        try:
            phis.append(fit_joint(part, delta=delta, n_starts=n_starts).law.phi)
        except ValueError as error:
            reason = f"seed {value:g} alone ({len(part)} runs) identifies no law: {error}"
            return SeedPhis(seeds=seeds, phis=(), mean=None, sd=None, reason=reason)
    return SeedPhis(
        seeds=seeds,
        phis=tuple(phis),
        mean=float(np.mean(phis)),
        sd=float(np.std(phis, ddof=1)),
        reason=None,
    )


def with_value(frame: pd.DataFrame, column: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Leave out the finished runs without a value; who they are."""
    absent = frame[column].isna() & is_finished(frame)
    part = frame[~absent].copy()
    part.attrs.update(frame.attrs)
    names = frame["run_id"] if "run_id" in frame else frame.index.to_series()
    return part, tuple(str(name) for name in names[absent])


def _share(spread: SeedSpread | None, between: float | None) -> float | None:
    if spread is None or between is None:
        return None
    return spread.sd / between if between > 0 else float("inf")


def _ends(interval: PhiInterval) -> tuple[float, float] | None:
    if interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def _refused(
    column: str,
    reason: str,
    missing: tuple[str, ...],
    thresholds: Thresholds,
    table: RunTable | None = None,
) -> AxisFit:
    """Build the result of an axis whose runs identify no law."""
    return AxisFit(
        axis=column,
        phi=None,
        phi_ci=None,
        reason=reason,
        n_runs=0 if table is None else len(table),
        missing=missing,
        fit=None,
        interval=None,
        settings=() if table is None else seed_means(table.runs),
        spread=None if table is None else seed_spread(table.runs),
        between=None if table is None else between_r(table.runs),
        by_seed=None,
        thresholds=thresholds,
    )
