"""Compute-optimal frontier: the smallest loss at a budget, with exact FLOPs per token.

For one architecture the training FLOPs per token and the parameters are polynomials in the hidden
size d (d and d²); they are read off the table's own columns, and L(N(d), D = C / F(d)) is
minimised over d, which may be fractional. Symbols: C budget in FLOPs, F training FLOPs per token, D
tokens, N parameters (count), L loss in nats per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar

from ..record import Record
from ..runs.kinds import architecture_name, by_architecture, effective_depths
from ..solver.laws import Chinchilla, FloatArray, JointLaw

Law = JointLaw | Chinchilla

WIDEN = 64.0  # widths from 1/64 of the table's smallest to 64 times its largest are searched
_GRID = 240  # widths tried before the minimum is bracketed, 5 % apart on the paper's table
_TOLERANCE = 1e-3  # largest relative error of a polynomial at the table's own widths
_COUNTS = ("train_flops_per_token", "n_once", "n_rec", "n")


@dataclass(frozen=True, kw_only=True)
class Architecture(Record):
    """One architecture (r and effective depth) as a function of the hidden size d.

    Coefficients of (d, d²) for the training FLOPs per token, N_once and N_rec under the table's
    split, and N, the model's own parameters; smallest and largest width of the table.
    effective_depth: executed layers, None where the table does not say.
    """

    r: int
    flops: tuple[float, float]
    n_once: tuple[float, float]
    n_rec: tuple[float, float]
    n: tuple[float, float]
    smallest: float
    largest: float
    effective_depth: float | None = None

    def at(self, width: FloatArray | float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Training FLOPs per token, N_once and N_rec at width d."""
        return (
            polynomial(self.flops, width),
            polynomial(self.n_once, width),
            polynomial(self.n_rec, width),
        )

    def parameters(self, width: FloatArray | float) -> FloatArray:
        """N, the model's own n_once + n_rec whatever the split, at width d."""
        return polynomial(self.n, width)

    def effective(self, law: Law, width: FloatArray | float) -> FloatArray:
        """N_eff at width d; N itself under Chinchilla's law, which knows no recurrences."""
        if isinstance(law, Chinchilla):
            return self.parameters(width)
        _, n_once, n_rec = self.at(width)
        return np.asarray(law.effective_parameters(n_once, n_rec, self.r), dtype=float)

    def loss(self, law: Law, width: FloatArray | float, tokens: FloatArray | float) -> FloatArray:
        """Predicted loss at width d after D tokens, nats per token."""
        if isinstance(law, Chinchilla):
            return np.asarray(law.loss(self.parameters(width), tokens), dtype=float)
        _, n_once, n_rec = self.at(width)
        return np.asarray(law.loss(n_once, n_rec, self.r, tokens), dtype=float)


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Record):
    """The compute-optimal model of one architecture at one budget.

    Width, own parameters N, N_eff (N itself under Chinchilla's law), tokens and loss; all None, with
    the reason, when the loss still falls at the edge of the searched widths (`WIDEN`).
    extrapolated: the optimum lies outside the widths of the table.
    """

    budget_flops: float
    r: int
    effective_depth: float | None
    hidden_size: float | None
    n: float | None
    n_eff: float | None
    tokens: float | None
    loss: float | None
    extrapolated: bool
    reason: str | None


def architectures(runs: pd.DataFrame) -> tuple[tuple[Architecture, ...], dict[int, str]]:
    """Every architecture of a table of fitted runs as polynomials in d.

    For the others the reason why not, by r.
    """
    found: list[Architecture] = []
    reasons: dict[int, str] = {}
    several = len(effective_depths(runs)) > 1
    for r, depth, group in by_architecture(runs):
        one = _architecture(r, depth, group)
        if isinstance(one, Architecture):
            found.append(one)
            continue
        reason = f"{architecture_name(r, depth)}: {one}" if several else one
        reasons[r] = f"{reasons[r]}; {reason}" if r in reasons else reason
    return tuple(found), reasons


def _architecture(r: int, depth: float | None, group: pd.DataFrame) -> Architecture | str:
    """One architecture from its runs, or the reason why not."""
    missing = _missing(group)
    if missing is not None:
        return missing
    widths = group["hidden_size"].to_numpy(dtype=float)
    fits = {name: _fitted(widths, group[name].to_numpy(dtype=float)) for name in _COUNTS}
    name = max(fits, key=lambda column: fits[column][1])
    worst = fits[name][1]
    if worst > _TOLERANCE:
        return (
            f"{name} is no polynomial in the width (off by {worst:.1%}): "
            "several architectures share this r, its shape changes with the width, or the regression "
            "split found other r at some widths than at others"
        )
    one = Architecture(
        r=r,
        flops=fits["train_flops_per_token"][0],
        n_once=fits["n_once"][0],
        n_rec=fits["n_rec"][0],
        n=fits["n"][0],
        smallest=float(widths.min()),
        largest=float(widths.max()),
        effective_depth=depth,
    )
    ends = np.array(_searched(one))
    flops, n_once, n_rec = one.at(ends)
    if not all(np.all(values > 0) for values in (flops, n_once + n_rec, one.parameters(ends))):
        return (
            f"the polynomials of FLOPs and parameters turn negative between widths {ends[0]:.4g} "
            f"and {ends[1]:.4g}"
        )
    return one


def _missing(group: pd.DataFrame) -> str | None:
    for name in ("hidden_size", "train_flops_per_token"):
        if name not in group or group[name].isna().any():
            return f"column {name} is missing"
    if group["hidden_size"].nunique() < 2:
        return "a single width"
    return None


def _fitted(width: FloatArray, values: FloatArray) -> tuple[tuple[float, float], float]:
    """Fit values = c1·d + c2·d² by least squares in relative error.

    Returns (c1, c2) and the largest relative error at the table's widths.
    """
    scale = np.maximum(np.abs(values), 1.0)
    unit = width / width.max()
    basis = np.stack([unit, unit**2], axis=1) / scale[:, None]
    (c1, c2), *_ = np.linalg.lstsq(basis, values / scale, rcond=None)
    error = float(np.max(np.abs(basis @ np.array([c1, c2]) - values / scale)))
    return (float(c1 / width.max()), float(c2 / width.max() ** 2)), error


def polynomial(coefficients: tuple[float, float], width: FloatArray | float) -> FloatArray:
    """c1·d + c2·d²."""
    d = np.asarray(width, dtype=float)
    return coefficients[0] * d + coefficients[1] * d**2


def _searched(one: Architecture) -> tuple[float, float]:
    return one.smallest / WIDEN, one.largest * WIDEN


def optimum(law: Law, architecture: Architecture, budget_flops: float) -> FrontierPoint:
    """Minimise the law's loss over the width at budget C: N*(C), D*(C), L*(C) of one architecture.

    An optimum at the edge of the searched widths is none: the point then holds None and the reason.
    Raises ValueError for a budget that is not positive and finite.
    """
    if not (np.isfinite(budget_flops) and budget_flops > 0):
        raise ValueError(
            f"budget_flops is {budget_flops}, but must be positive and finite. Give FLOPs, "
            "for example 1e19."
        )

    def loss(log_width: FloatArray | float) -> FloatArray:
        width = np.exp(log_width)
        return architecture.loss(law, width, budget_flops / polynomial(architecture.flops, width))

    low, high = _searched(architecture)
    grid = np.linspace(np.log(low), np.log(high), _GRID)
    best = int(np.argmin(loss(grid)))
    if best in (0, _GRID - 1):
        return _at_edge(architecture, budget_flops, smallest=best == 0)
    result = minimize_scalar(
        lambda x: float(loss(x)),
        bounds=(float(grid[best - 1]), float(grid[best + 1])),
        method="bounded",
        options={"xatol": 1e-9},
    )
    width = float(np.exp(result.x))
    tokens = budget_flops / float(polynomial(architecture.flops, width))
    return FrontierPoint(
        budget_flops=float(budget_flops),
        r=architecture.r,
        effective_depth=architecture.effective_depth,
        hidden_size=width,
        n=float(architecture.parameters(width)),
        n_eff=float(architecture.effective(law, width)),
        tokens=tokens,
        loss=float(architecture.loss(law, width, tokens)),
        extrapolated=not architecture.smallest <= width <= architecture.largest,
        reason=None,
    )


def _at_edge(architecture: Architecture, budget_flops: float, *, smallest: bool) -> FrontierPoint:
    low, high = _searched(architecture)
    return FrontierPoint(
        budget_flops=float(budget_flops),
        r=architecture.r,
        effective_depth=architecture.effective_depth,
        hidden_size=None,
        n=None,
        n_eff=None,
        tokens=None,
        loss=None,
        extrapolated=True,
        reason=(
            f"the loss still falls towards the {'smallest' if smallest else 'largest'} searched "
            f"width, {low if smallest else high:.4g} (the table's widths are "
            f"{architecture.smallest:g} to {architecture.largest:g})"
        ),
    )


def frontier(law: Law, found: Iterable[Architecture], budgets: Iterable[float]) -> pd.DataFrame:
    """Compute-optimal points of every architecture at every budget.

    One row each (the fields of `FrontierPoint`), NaN where there is no optimum.
    """
    values = [float(budget) for budget in budgets]
    points = pd.DataFrame([vars(optimum(law, one, budget)) for one in found for budget in values])
    numbers = [name for name in ("hidden_size", "n", "n_eff", "tokens", "loss") if name in points]
    return points.astype(dict.fromkeys(numbers, float))
