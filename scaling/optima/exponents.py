"""How the compute-optimal model grows: N* ∝ C^a, D* ∝ C^b, L* − E ∝ C^−c for every architecture.

Two ways, side by side. Exact: minimise the law over the width with the architecture's own FLOPs, then
take slopes over the table's budgets. Power law: F = k·N^γ fitted over the table's widths makes the
minimum a closed form, a = β/(α + γβ), b = 1 − γ·a, c = α·a (what the paper reports; Hoffmann et al.
2022, eq. 4, is γ = 1). They differ where F is no power of N, as with the unembedding's share of small
models. Symbols: C budget in FLOPs, F training FLOPs per token, D tokens, N the model's own
parameters (count), L* lowest loss in nats per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..fits.subsets import ArchitectureFit
from ..record import Record
from ..runs.kinds import architecture_name, by_architecture
from ..runs.table import RunTable
from ..solver.laws import FloatArray, JointLaw
from .frontier import Architecture, Law, architectures, frontier


@dataclass(frozen=True, kw_only=True)
class Growth(Record):
    """Exponents of N*, D* and of the reducible loss L* − E in the budget C (loss: positive, it falls)."""

    n: float
    tokens: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Exponents(Record):
    """Growth of one architecture's compute-optimal model under one law.

    effective_depth: executed layers, None where the table does not say. exact: with the
    architecture's exact FLOPs over the table's budgets. power_law: with F = k·N^γ. What could not be
    computed is None, and reason says why. extrapolated: an exact optimum lies outside the
    table's widths.
    """

    r: int
    effective_depth: float | None
    exact: Growth | None
    power_law: Growth | None
    k: float | None
    gamma: float | None
    extrapolated: bool
    reason: str | None


def frontier_exponents(
    table: RunTable, law: JointLaw | Sequence[ArchitectureFit]
) -> tuple[Exponents, ...]:
    """Exponents of every architecture of a table, by r, then effective depth.

    law: one joint law for all, or every architecture's own fit (`subsets.per_architecture`), which
    is what the paper's table reports.
    """
    found, reasons = architectures(table.runs)
    by_key = {(one.r, one.effective_depth): one for one in found}
    out = []
    for r, depth, group in by_architecture(table.runs):
        own, reason = _law_of(law, r, depth)
        architecture = by_key.get((r, depth))
        if architecture is None or own is None:
            out.append(_unavailable(r, depth, reason or reasons[r]))
        else:
            out.append(exponents(own, architecture, group))
    return tuple(out)


def _law_of(
    law: JointLaw | Sequence[ArchitectureFit], r: int, depth: float | None
) -> tuple[Law | None, str | None]:
    if isinstance(law, JointLaw):
        return law, None
    for one in law:
        if (one.r, one.effective_depth) == (r, depth):
            return (None, one.reason) if one.fit is None else (one.fit.law, None)
    return None, f"no fit of {architecture_name(r, depth)} was given"


def exponents(law: Law, architecture: Architecture, runs: pd.DataFrame) -> Exponents:
    """Exponents of one architecture at the budgets and widths of its runs.

    `runs` as in `table.RunTable.runs`, those of this architecture alone.
    """
    k, gamma = power_of_flops(runs)
    n = law.beta / (law.alpha + gamma * law.beta)
    exact, extrapolated, reason = _exact(law, architecture, runs)
    return Exponents(
        r=architecture.r,
        effective_depth=architecture.effective_depth,
        exact=exact,
        power_law=Growth(n=n, tokens=1.0 - gamma * n, loss=law.alpha * n),
        k=k,
        gamma=gamma,
        extrapolated=extrapolated,
        reason=reason,
    )


def power_of_flops(runs: pd.DataFrame) -> tuple[float, float]:
    """Fit F = k·N^γ, return k and γ: the least-squares line of log F on log N, every width once."""
    sizes = runs.drop_duplicates("hidden_size")
    log_n = np.log(sizes["n"].to_numpy(dtype=float))
    gamma, log_k = _line(log_n, np.log(sizes["train_flops_per_token"].to_numpy(dtype=float)))
    return float(np.exp(log_k)), gamma


def _exact(
    law: Law, architecture: Architecture, runs: pd.DataFrame
) -> tuple[Growth | None, bool, str | None]:
    """Slopes over the runs' budgets, whether an optimum is extrapolated, and the reason if none."""
    if "budget_flops" not in runs:
        return None, False, "column budget_flops is missing"
    budgets = sorted(runs["budget_flops"].dropna().unique())
    if len(budgets) < 2:
        return None, False, f"{len(budgets)} budget{'s' * (len(budgets) != 1)}, a slope needs 2"
    points = frontier(law, (architecture,), budgets)
    missing = points["reason"].dropna()
    if len(missing):
        return None, True, str(missing.iloc[0])
    log_c = np.log(points["budget_flops"].to_numpy(dtype=float))
    n, tokens, loss = (
        _line(log_c, np.log(values.to_numpy(dtype=float)))[0]
        for values in (points["n"], points["tokens"], points["loss"] - law.E)
    )
    growth = Growth(n=n, tokens=tokens, loss=-loss)
    return growth, bool(points["extrapolated"].any()), None


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope and intercept of the least-squares line."""
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def _unavailable(r: int, depth: float | None, reason: str) -> Exponents:
    return Exponents(
        r=r,
        effective_depth=depth,
        exact=None,
        power_law=None,
        k=None,
        gamma=None,
        extrapolated=False,
        reason=reason,
    )
