"""Fit the joint law, or Chinchilla's, to a run table.

Symbols follow Schwethelm et al. 2026 (arXiv:2604.21106): N_once, N_rec parameters, r recurrences, D
tokens, L loss in nats per token. R² and errors are in nats of loss, not of its logarithm.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ..record import Record
from ..runs.table import RunTable, as_table, design_of, unlooped_design
from ..solver.laws import Chinchilla, FloatArray, JointLaw
from ..solver.objective import Design
from ..solver.solve import RANDOM_STARTS, Solution, solve


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Observed − predicted loss of the runs of one r, in nats.

    Mean, largest size, root mean square, and R² within the runs of that r (NaN for equal losses).
    """

    r: int
    n_runs: int
    mean: float
    max_abs: float
    rmse: float
    r2: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(Record):
    """What a fit of either law says of itself beside the law.

    n_left_out: other runs by status. r2, rmse: in nats on loss. objective: sum of Huber terms of
    the log residuals (delta = 0: of their sizes). n_at_best: starts that reached the optimum.
    condition: of the Hessian over the free parameters (delta = 0: of the squared residuals').
    at_bound: names of parameters that stopped on a bound. loss_unit: nats or bits, what the losses
    were converted from. runs: the table's runs
    (`table.RunTable.runs`) with predicted and residual.
    """

    split: str
    loss: str
    n_runs: int
    n_left_out: dict[str, int]
    r2: float
    rmse: float
    residuals: tuple[Residuals, ...]
    objective: float
    delta: float
    n_starts: int
    n_at_best: int
    condition: float
    at_bound: tuple[str, ...]
    source: str
    loss_unit: str
    runs: pd.DataFrame = field(repr=False)

    @property
    def table(self) -> RunTable:
        """The fitted runs as a table."""
        return RunTable(
            runs=self.runs,
            split=self.split,
            loss=self.loss,
            source=self.source,
            n_left_out=self.n_left_out,
            loss_unit=self.loss_unit,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class JointFit(Fit):
    """The joint law fitted to a table. phi_fixed: the value φ was held at, None when it was fitted."""

    law: JointLaw
    phi_fixed: float | None

    @property
    def design(self) -> Design:
        """The fitted runs as the solver sees them."""
        return design_of(self.runs)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChinchillaFit(Fit):
    """Chinchilla's law fitted to a table, N being n_once + n_rec whatever r and the split."""

    law: Chinchilla

    @property
    def design(self) -> Design:
        """The fitted runs as the solver sees them."""
        return unlooped_design(self.runs, self.runs["n"].to_numpy(dtype=float))


def fit_joint(
    data: RunTable | pd.DataFrame,
    *,
    phi: float | None = None,
    delta: float = 1e-3,
    n_starts: int = RANDOM_STARTS,
) -> JointFit:
    """Fit L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β  (eq. 3) to the runs of a table.

    A frame is taken with the text's split and its val_loss; `RunTable.of` chooses others. `phi`
    holds φ at a value. `delta` is the Huber threshold on the log residual, 0 means least absolute
    deviations. Raises ValueError for a bad table or a design that cannot identify the parameters.
    Source: Schwethelm et al. 2026, eq. 3 and 4.
    """
    table = as_table(data)
    solution = solve(table.design, phi=phi, delta=delta, n_starts=n_starts, where=table.source)
    predicted = predict(solution.law, table.runs)
    return JointFit(
        law=solution.law, phi_fixed=phi, **_described(table, solution, predicted, delta)
    )


def fit_chinchilla(
    data: RunTable | pd.DataFrame, *, delta: float = 1e-3, n_starts: int = RANDOM_STARTS
) -> ChinchillaFit:
    """Fit L = E + A·N^−α + B·D^−β  (eq. 2), N = n_once + n_rec, whatever the recurrences.

    Arguments and errors as in `fit_joint`. Source: Hoffmann et al. 2022, arXiv:2203.15556.
    """
    table = as_table(data)
    n, d = table.runs["n"].to_numpy(dtype=float), table.runs["tokens"].to_numpy(dtype=float)
    design = unlooped_design(table.runs, n)
    solution = solve(design, phi=0.0, delta=delta, n_starts=n_starts, where=table.source)
    found = solution.law
    law = Chinchilla(E=found.E, A=found.A, alpha=found.alpha, B=found.B, beta=found.beta)
    return ChinchillaFit(
        law=law, **_described(table, solution, np.asarray(law.loss(n, d), dtype=float), delta)
    )


def predict(law: JointLaw, runs: pd.DataFrame) -> FloatArray:
    """Predict the loss of a table of runs, nats per token, [n]."""
    n_once, n_rec, r, tokens = (
        runs[name].to_numpy(dtype=float) for name in ("n_once", "n_rec", "r", "tokens")
    )
    return np.asarray(law.loss(n_once, n_rec, r, tokens), dtype=float)


def r_squared(residual: FloatArray, observed: FloatArray) -> float:
    """1 − Σ residual² / Σ (observed − mean)², NaN when all observed values are equal."""
    spread = float(np.sum((observed - observed.mean()) ** 2))
    return 1.0 - float(np.sum(residual**2)) / spread if spread > 0 else float("nan")


def _described(
    table: RunTable, solution: Solution, predicted: FloatArray, delta: float
) -> dict[str, Any]:
    runs = table.runs.assign(predicted=predicted, residual=table.runs["loss"] - predicted)
    residual, observed = (runs[name].to_numpy(dtype=float) for name in ("residual", "loss"))
    return {
        "split": table.split,
        "loss": table.loss,
        "n_runs": len(runs),
        "n_left_out": table.n_left_out,
        "r2": r_squared(residual, observed),
        "rmse": float(np.sqrt(np.mean(residual**2))),
        "residuals": tuple(
            residuals_of(int(group["r"].iloc[0]), group) for _, group in runs.groupby("r")
        ),
        "objective": solution.objective,
        "delta": delta,
        "n_starts": solution.n_starts,
        "n_at_best": solution.n_at_best,
        "condition": solution.condition,
        "at_bound": solution.at_bound,
        "source": table.source,
        "loss_unit": table.loss_unit,
        "runs": runs,
    }


def residuals_of(r: int, runs: pd.DataFrame) -> Residuals:
    """Summarise the residuals of a table with columns loss and residual."""
    residual, observed = (runs[name].to_numpy(dtype=float) for name in ("residual", "loss"))
    return Residuals(
        r=r,
        n_runs=len(residual),
        mean=float(residual.mean()),
        max_abs=float(np.abs(residual).max()),
        rmse=float(np.sqrt(np.mean(residual**2))),
        r2=r_squared(residual, observed),
    )
