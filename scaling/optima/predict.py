"""Loss of runs that were not fitted: planned ones, and runs held out to test the law.

Symbols: C budget in FLOPs, F training FLOPs per token, D tokens, N_once and N_rec parameters (count)
under the split that the law was fitted with, L loss in nats per token.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..fits.fit import JointFit, Residuals, fit_joint, predict, residuals_of
from ..record import Record
from ..runs.table import RunTable
from ..solver.laws import JointLaw
from ..solver.solve import RANDOM_STARTS
from .frontier import Architecture, polynomial


@dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """Predicted loss of one planned run, nats per token.

    hidden_size and budget_flops are None for a run given by its parameter counts. extrapolated: the
    width lies outside those that the architecture was read off, None where no width is given.
    """

    r: int
    n_once: float
    n_rec: float
    n_eff: float
    tokens: float
    loss: float
    hidden_size: float | None
    budget_flops: float | None
    extrapolated: bool | None


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut(Record):
    """Runs predicted by a law that was fitted without them.

    runs: the held-out ones with predicted and residual (observed − predicted, nats); mean, max_abs,
    rmse: of these residuals; residuals: the same by r. fit is None when the other runs cannot identify the law;
    `reason` says why.
    """

    n_fitted: int
    n_held_out: int
    fit: JointFit | None
    mean: float | None
    max_abs: float | None
    rmse: float | None
    residuals: tuple[Residuals, ...]
    reason: str | None
    runs: pd.DataFrame = field(repr=False)


def predict_run(law: JointLaw, *, n_once: float, n_rec: float, r: int, tokens: float) -> Prediction:
    """Predict the loss of a run from its parameter counts under the law's split, r and tokens.

    Raises ValueError for counts that are not positive and finite (one of n_once, n_rec may be 0).
    """
    for name, value, low in (("n_once", n_once, 0), ("n_rec", n_rec, 0), ("r", r, 1)):
        if not (np.isfinite(value) and value >= low):
            raise ValueError(f"{name} is {value}, but must be at least {low} and finite.")
    if n_once + n_rec == 0:
        raise ValueError("n_once and n_rec are both 0, but a model has parameters. Give counts.")
    _refuse_not_positive("tokens", tokens)
    return Prediction(
        r=int(r),
        n_once=float(n_once),
        n_rec=float(n_rec),
        n_eff=float(law.effective_parameters(float(n_once), float(n_rec), float(r))),
        tokens=float(tokens),
        loss=float(law.loss(float(n_once), float(n_rec), float(r), float(tokens))),
        hidden_size=None,
        budget_flops=None,
        extrapolated=None,
    )


def predict_width(
    law: JointLaw,
    architecture: Architecture,
    hidden_size: float,
    *,
    budget_flops: float | None = None,
    tokens: float | None = None,
) -> Prediction:
    """Predict the loss of an architecture at a width, for a budget (D = C / F) or for its tokens.

    `architecture` comes from `frontier.architectures` of the fitted runs, so that its counts follow
    the law's split. Raises ValueError unless exactly one of budget_flops and tokens is given.
    """
    _refuse_not_positive("hidden_size", hidden_size)
    flops = float(polynomial(architecture.flops, hidden_size))
    if (budget_flops is None) == (tokens is None):
        raise ValueError(
            f"budget_flops is {budget_flops} and tokens is {tokens}, but exactly one of them says how "
            "long the run is. Give one."
        )
    if budget_flops is None:
        assert tokens is not None
        _refuse_not_positive("tokens", tokens)
        budget_flops = tokens * flops
    else:
        _refuse_not_positive("budget_flops", budget_flops)
        tokens = budget_flops / flops
    _, n_once, n_rec = (float(value) for value in architecture.at(hidden_size))
    return Prediction(
        r=architecture.r,
        n_once=n_once,
        n_rec=n_rec,
        n_eff=float(architecture.effective(law, hidden_size)),
        tokens=float(tokens),
        loss=float(architecture.loss(law, hidden_size, tokens)),
        hidden_size=float(hidden_size),
        budget_flops=float(budget_flops),
        extrapolated=not architecture.smallest <= hidden_size <= architecture.largest,
    )


def held_out(
    table: RunTable, out: ArrayLike, *, delta: float = 1e-3, n_starts: int = RANDOM_STARTS
) -> HeldOut:
    """Fit the joint law without the runs where `out` (boolean, [n]) is true, and predict those.

    The split stays that of the whole table. Raises ValueError when `out` marks no run or has
    another length.
    """
    marked = np.asarray(out, dtype=bool)
    if marked.shape != (len(table),) or not marked.any():
        raise ValueError(
            f"out marks {int(marked.sum())} runs in {marked.size} values, but must mark at least one "
            f"of the table's {len(table)} runs, one value each."
        )
    rest, runs = table.where(~marked), table.where(marked).runs
    if not len(rest):
        return _no_prediction(0, runs, "every run is held out")
    try:
        fit = fit_joint(rest, delta=delta, n_starts=n_starts)
    except ValueError as error:
        return _no_prediction(len(rest), runs, str(error))
    predicted = predict(fit.law, runs)
    residual = runs["loss"].to_numpy(dtype=float) - predicted
    runs = runs.assign(predicted=predicted, residual=residual)
    return HeldOut(
        n_fitted=len(rest),
        n_held_out=len(runs),
        fit=fit,
        mean=float(residual.mean()),
        max_abs=float(np.abs(residual).max()),
        rmse=float(np.sqrt(np.mean(residual**2))),
        residuals=tuple(
            residuals_of(int(group["r"].iloc[0]), group) for _, group in runs.groupby("r")
        ),
        reason=None,
        runs=runs,
    )


def _no_prediction(n_fitted: int, runs: pd.DataFrame, reason: str) -> HeldOut:
    return HeldOut(
        n_fitted=n_fitted,
        n_held_out=len(runs),
        fit=None,
        mean=None,
        max_abs=None,
        rmse=None,
        residuals=(),
        reason=reason,
        runs=runs,
    )


def _refuse_not_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}, but must be positive and finite.")
