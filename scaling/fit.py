"""Fit the joint law to a run table.

Symbols follow Schwethelm et al. 2026 (arXiv:2604.21106): N_once, N_rec parameters, r recurrences, D
tokens, L loss in nats per token. R² and errors are in nats of loss, not of its logarithm.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from .checks import refuse_bad_runs
from .laws import FloatArray, JointLaw
from .objective import Design
from .runs import is_finished, left_out
from .solve import RANDOM_STARTS, solve
from .split import split_parameters


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Observed − predicted loss of the runs of one r, in nats.

    Mean, largest size, root mean square.
    """

    r: int
    n_runs: int
    mean: float
    max_abs: float
    rmse: float


@dataclass(frozen=True, kw_only=True, eq=False)
class JointFit:
    """The joint law fitted to a table, with what the fit used and how well it describes the runs.

    phi_fixed: the value φ was held at, None when it was fitted. n_left_out: other runs by status.
    r2, rmse: in nats on loss. objective: sum of Huber terms of the log residuals. n_at_best: starts
    that reached the optimum. at_bound: names of parameters that stopped on a bound. runs: one row
    per fitted run with the split applied (run_id, r, n_once, n_rec, tokens, loss, predicted,
    residual, and budget_flops, hidden_size, train_flops_per_token, seed where the table has them).
    """

    law: JointLaw
    split: str
    loss: str
    phi_fixed: float | None
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
    runs: pd.DataFrame = field(repr=False)

    @property
    def design(self) -> Design:
        """The fitted runs as the solver sees them."""
        return design_of(self.runs)


def fit_joint(
    frame: pd.DataFrame,
    *,
    split: str = "text",
    loss: str = "val_loss",
    phi: float | None = None,
    delta: float = 1e-3,
    whole: pd.DataFrame | None = None,
    n_starts: int = RANDOM_STARTS,
) -> JointFit:
    """Fit L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β  (eq. 3) to the finished runs of a table.

    `split` says what N_once and N_rec are (`split.SPLITS`); for "regression" it is computed on
    `whole`, the table that `frame` is a subset of (default: `frame`). `loss` is the fitted column,
    nats per token. `phi` holds φ at a value. Raises ValueError for a bad table or a design that
    cannot identify the parameters. Source: Schwethelm et al. 2026, eq. 3 and 4.
    """
    refuse_bad_runs(frame, loss=loss)
    runs = fitted_runs(frame, split=split, loss=loss, whole=whole)
    source = str(frame.attrs.get("source", "the run table"))
    solution = solve(design_of(runs), phi=phi, delta=delta, n_starts=n_starts, where=source)
    runs["predicted"] = predict(solution.law, runs)
    runs["residual"] = runs["loss"] - runs["predicted"]
    residual, observed = runs["residual"].to_numpy(), runs["loss"].to_numpy()
    spread = float(np.sum((observed - observed.mean()) ** 2))
    return JointFit(
        law=solution.law,
        split=split,
        loss=loss,
        phi_fixed=phi,
        n_runs=len(runs),
        n_left_out=left_out(frame),
        r2=1.0 - float(np.sum(residual**2)) / spread if spread > 0 else float("nan"),
        rmse=float(np.sqrt(np.mean(residual**2))),
        residuals=tuple(
            _residuals(int(group["r"].iloc[0]), group["residual"].to_numpy())
            for _, group in runs.groupby("r")
        ),
        objective=solution.objective,
        delta=delta,
        n_starts=solution.n_starts,
        n_at_best=solution.n_at_best,
        condition=solution.condition,
        at_bound=solution.at_bound,
        source=source,
        runs=runs,
    )


def fitted_runs(
    frame: pd.DataFrame, *, split: str, loss: str = "val_loss", whole: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Take the finished runs and apply the split.

    Columns: run_id, r, n_once, n_rec, n, tokens, loss and those that plots and intervals need.
    n is n_once + n_rec of the table (the model's own parameters), whatever the split.
    """
    finished = frame[is_finished(frame)]
    table = finished if whole is None else whole[is_finished(whole)]
    n_once, n_rec = split_parameters(finished, split, whole=table)
    runs = pd.DataFrame(
        {
            "run_id": finished["run_id"].astype(str).to_numpy(),
            "r": finished["recurrences"].to_numpy(dtype=float).astype(int),
            "n_once": n_once,
            "n_rec": n_rec,
            "n": finished["n_once"].to_numpy(dtype=float) + finished["n_rec"].to_numpy(dtype=float),
            "tokens": finished["tokens"].to_numpy(dtype=float),
            "loss": finished[loss].to_numpy(dtype=float),
        }
    )
    for name in ("budget_flops", "hidden_size", "train_flops_per_token", "seed"):
        if name in finished:
            runs[name] = finished[name].to_numpy(dtype=float)
    return runs


def design_of(runs: pd.DataFrame) -> Design:
    """Turn a table of fitted runs into the solver's view."""
    columns = {
        name: runs[name].to_numpy(dtype=float)
        for name in ("n_once", "n_rec", "r", "tokens", "loss")
    }
    return Design.of(**columns)


def predict(law: JointLaw, runs: pd.DataFrame) -> FloatArray:
    """Predict the loss of a table of fitted runs, nats per token, [n]."""
    n_once, n_rec, r, tokens = (
        runs[name].to_numpy(dtype=float) for name in ("n_once", "n_rec", "r", "tokens")
    )
    return np.asarray(law.loss(n_once, n_rec, r, tokens), dtype=float)


def _residuals(r: int, residual: FloatArray) -> Residuals:
    return Residuals(
        r=r,
        n_runs=len(residual),
        mean=float(residual.mean()),
        max_abs=float(np.abs(residual).max()),
        rmse=float(np.sqrt(np.mean(residual**2))),
    )
