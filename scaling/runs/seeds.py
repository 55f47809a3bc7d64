"""Noise between seeds beside the distance between r: whether a grid tells its r apart.

Symbols: r recurrences, N parameters (count), loss in nats per token. Tables are those of
`table.RunTable.runs`.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """Pooled standard deviation of one run's loss over seeds, sqrt(Σ (L − mean)² / dof), nats.

    dof: Σ (runs − 1) over the settings (budget, r, width) that have several runs. n_settings:
    how many those are.
    """

    sd: float
    dof: int
    n_settings: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Best loss of one r (mean over seeds at its best width) minus that of the next smaller r.

    At one budget, nats.
    """

    budget_flops: float
    r_low: int
    r_high: int
    loss_low: float
    loss_high: float

    @property
    def gap(self) -> float:
        """loss_high − loss_low, nats per token."""
        return self.loss_high - self.loss_low


def seed_spread(runs: pd.DataFrame) -> SeedSpread | None:
    """Spread over seeds at equal (budget, r, N, tokens), or None when no setting was run twice."""
    keys = [name for name in ("budget_flops", "r", "n", "tokens") if name in runs]
    groups = runs.groupby(keys, dropna=False)["loss"]
    counts = groups.size()
    repeated = counts[counts > 1]
    dof = int((repeated - 1).sum())
    if dof == 0:
        return None
    squares = float(((runs["loss"] - groups.transform("mean")) ** 2).sum())
    return SeedSpread(sd=float(np.sqrt(squares / dof)), dof=dof, n_settings=len(repeated))


def gaps_between_r(runs: pd.DataFrame) -> tuple[Gap, ...]:
    """Distance between neighbouring r at every budget.

    From each r's best width; empty without budgets.
    """
    if "budget_flops" not in runs:
        return ()
    gaps = []
    settings = runs.groupby(["budget_flops", "r", "n"])["loss"].mean()
    best = settings.groupby(level=["budget_flops", "r"]).min().unstack("r")
    for budget, row in best.iterrows():
        present = row.dropna()
        for low, high in zip(present.index[:-1], present.index[1:], strict=True):
            gaps.append(
                Gap(
                    budget_flops=float(budget),  # type: ignore[arg-type]
                    r_low=int(low),
                    r_high=int(high),
                    loss_low=float(present[low]),
                    loss_high=float(present[high]),
                )
            )
    return tuple(gaps)
