"""Compute-optimal frontier: the smallest loss at a budget, with exact FLOPs per token.

For one r the training FLOPs per token, N_once and N_rec are polynomials in the hidden size d (d
and d²); they are read off the table's own columns, and L(N(d), D = C / F(d)) is minimised over
d, which may be fractional. Symbols: C budget in FLOPs, F training FLOPs per token, D tokens, N
parameters (count), L loss in nats per token.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from .laws import FloatArray, JointLaw

_WIDEN = 16.0  # widths from 1/16 of the table's smallest to 16 times its largest are searched
_TOLERANCE = 1e-3  # largest relative error of a polynomial at the table's own widths


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One r as a function of the hidden size d.

    Coefficients of (d, d²) and the widths of the table.
    """

    r: int
    flops: tuple[float, float]
    n_once: tuple[float, float]
    n_rec: tuple[float, float]
    smallest: float
    largest: float

    def at(self, width: FloatArray | float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Training FLOPs per token, N_once and N_rec at width d."""
        d = np.asarray(width, dtype=float)
        flops, n_once, n_rec = (
            c1 * d + c2 * d**2 for c1, c2 in (self.flops, self.n_once, self.n_rec)
        )
        return flops, n_once, n_rec


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """The compute-optimal model of one r at one budget.

    Width, N = N_once + N_rec, N_eff, tokens and loss.
    """

    budget_flops: float
    r: int
    hidden_size: float
    n: float
    n_eff: float
    tokens: float
    loss: float


def architectures(runs: pd.DataFrame) -> tuple[tuple[Architecture, ...], dict[int, str]]:
    """Every r of a table of fitted runs as polynomials in d.

    For the others the reason why not.
    """
    found: list[Architecture] = []
    reasons: dict[int, str] = {}
    for _, group in runs.groupby("r", sort=True):
        r = int(group["r"].iloc[0])
        reason = _missing(group)
        if reason is None:
            widths = group["hidden_size"].to_numpy(dtype=float)
            columns = {
                name: group[name].to_numpy(dtype=float)
                for name in ("train_flops_per_token", "n_once", "n_rec")
            }
            fits = {name: _polynomial(widths, values) for name, values in columns.items()}
            worst = max(error for _, error in fits.values())
            if worst > _TOLERANCE:
                reason = (
                    f"no polynomial in the width (off by {worst:.1%}): "
                    "several architectures share this r"
                )
            else:
                found.append(
                    Architecture(
                        r=r,
                        flops=fits["train_flops_per_token"][0],
                        n_once=fits["n_once"][0],
                        n_rec=fits["n_rec"][0],
                        smallest=float(widths.min()),
                        largest=float(widths.max()),
                    )
                )
        if reason is not None:
            reasons[r] = reason
    return tuple(found), reasons


def _missing(group: pd.DataFrame) -> str | None:
    for name in ("hidden_size", "train_flops_per_token"):
        if name not in group or group[name].isna().any():
            return f"column {name} is missing"
    if group["hidden_size"].nunique() < 2:
        return "a single width"
    return None


def _polynomial(width: FloatArray, values: FloatArray) -> tuple[tuple[float, float], float]:
    """Fit values = c1·d + c2·d² by least squares in relative error.

    Returns (c1, c2) and the largest relative error at the table's widths.
    """
    scale = np.maximum(np.abs(values), 1.0)
    unit = width / width.max()
    basis = np.stack([unit, unit**2], axis=1) / scale[:, None]
    (c1, c2), *_ = np.linalg.lstsq(basis, values / scale, rcond=None)
    error = float(np.max(np.abs(basis @ np.array([c1, c2]) - values / scale)))
    return (float(c1 / width.max()), float(c2 / width.max() ** 2)), error


def optimum(law: JointLaw, architecture: Architecture, budget_flops: float) -> FrontierPoint:
    """Minimise the law's loss over the width at budget C: N*(C), D*(C), L*(C) of one r."""

    def loss(log_width: FloatArray | float) -> FloatArray:
        flops, n_once, n_rec = architecture.at(np.exp(log_width))
        return np.asarray(law.loss(n_once, n_rec, architecture.r, budget_flops / flops))

    grid = np.linspace(
        np.log(architecture.smallest / _WIDEN), np.log(architecture.largest * _WIDEN), 120
    )
    best = int(np.argmin(loss(grid)))
    bracket = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
    result = minimize_scalar(
        lambda x: float(loss(x)), bounds=bracket, method="bounded", options={"xatol": 1e-9}
    )
    width = float(np.exp(result.x))
    flops, n_once, n_rec = (float(value) for value in architecture.at(width))
    return FrontierPoint(
        budget_flops=float(budget_flops),
        r=architecture.r,
        hidden_size=width,
        n=n_once + n_rec,
        n_eff=float(law.effective_parameters(n_once, n_rec, architecture.r)),
        tokens=budget_flops / flops,
        loss=float(law.loss(n_once, n_rec, architecture.r, budget_flops / flops)),
    )


def frontier(law: JointLaw, found: tuple[Architecture, ...], budgets: FloatArray) -> pd.DataFrame:
    """Compute-optimal points of every architecture at every budget.

    One row each (the fields of `FrontierPoint`).
    """
    return pd.DataFrame(
        [vars(optimum(law, one, float(budget))) for one in found for budget in budgets]
    )
