"""What interval of φ, or of Δφ, a planned grid would give, for a guess of the law and of the noise.

A run's loss is the law's plus two normal parts: one of its own, one shared by its (budget, r) cell.
`Sensitivity` is the large-sample answer, fast enough to try thousands of grids: the Huber estimator
moves with the residuals as φ̂ − φ ≈ Σ_i c_i·ψ_i, ψ_i = clip(ρ_i, ±δ), c = (H⁻¹·∇ρ_i)_φ, H = Σ_i
P(|ρ_i| < δ)·∇ρ_i·∇ρ_iᵀ. `simulate` checks it: synthetic losses, each set fitted and block-bootstrapped
as a real table would be. Symbols: ρ log residual, δ Huber threshold, n runs. Source of estimator and
bootstrap: Schwethelm et al. 2026 (arXiv:2604.21106), eq. 4 and appendix G.2; of the expansion: Huber
1981, Robust Statistics, chapter 6.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtr

from ..fits.cells import Cells, cells_of, draw_cells
from ..fits.fit import predict
from ..record import Record
from ..runs.table import design_of
from ..solver.identify import refuse_unidentifiable
from ..solver.laws import FloatArray, JointLaw
from ..solver.objective import Design, evaluate
from ..solver.solve import from_law, solve_resamples
from .noise import Noise

Z95 = 1.959964  # 97.5th percentile of the standard normal
_NODES = np.linspace(-5.0, 5.0, 201)  # of a cell's shared part, in standard deviations
_PHI = 5  # place of φ in θ
_LARGEST = 0.1  # of noise as a share of the loss: beyond, a drawn loss may be negative


@dataclass(frozen=True, kw_only=True)
class Forecast(Record):
    """The interval that a grid would give, by simulation; widths are upper minus lower end, 95 %.

    of: "phi" or "delta_phi". truth: its value in the law that was simulated. low, high: where
    the estimates of `n_sets` synthetic tables lie. bias: their mean minus the truth. expected:
    median width of the block bootstrap's intervals over `n_bootstrapped` of the tables, of which
    `n_covered` held the truth, expected_range their 10th and 90th percentile; None when cells are
    too few. approximate: width by the large-sample formula. p_sign: share of estimates with the
    truth's sign.
    """

    of: str
    truth: float
    low: float
    high: float
    bias: float
    approximate: float
    expected: float | None
    expected_range: tuple[float, float] | None
    n_sets: int
    n_bootstrapped: int
    n_covered: int
    p_sign: float

    @property
    def width(self) -> float:
        """What the report of such a table would show: the bootstrap's width, else the spread."""
        return self.high - self.low if self.expected is None else self.expected


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity:
    """How residuals of each run move the fit, at one law: gradient [n, 6], inside [n], own [n].

    gradient: ∇ρ. inside: P(|ρ| < δ). own: variance of ψ that the cell does not share. shared
    [n, nodes]: mean of ψ given the cell's part, times the root of the node's weight. cells [n]:
    which cell a run lies in.
    """

    gradient: FloatArray
    inside: FloatArray
    own: FloatArray
    shared: FloatArray
    cells: NDArray[np.int64]

    @classmethod
    def of(
        cls, runs: pd.DataFrame, law: JointLaw, noise: Noise, *, delta: float = 1e-3
    ) -> "Sensitivity":
        """Compute it for planned runs; any subset of rows can then be asked for."""
        loss = predict(law, runs)
        design = design_of(runs.assign(loss=loss * np.e))  # residual −1: ψ = −1 inside a wide δ
        theta = np.repeat(from_law(design, law)[None], design.n, axis=0)
        at_one = evaluate(design, theta, np.eye(design.n), 10.0, np.zeros(design.n, dtype=bool))
        run, cell = noise.run / loss, noise.cell / loss  # nats → logs
        total = np.hypot(run, cell)
        x = delta / total
        inside = 2 * ndtr(x) - 1
        density = np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
        variance = total**2 * (inside - 2 * x * density) + delta**2 * (1 - inside)
        weight = np.exp(-0.5 * _NODES**2)
        shared = _clipped_mean(cell[:, None] * _NODES, run[:, None], delta) * np.sqrt(
            weight / weight.sum()
        )
        return cls(
            gradient=-at_one.gradient,
            inside=inside,
            own=np.maximum(variance - np.sum(shared**2, axis=1), 0.0),
            shared=shared,
            cells=np.asarray(runs.groupby(["budget_flops", "r"]).ngroup(), dtype=np.int64),
        )

    def pull(self, rows: NDArray[np.int64]) -> FloatArray | None:
        """Return c of the runs in `rows`, by which φ̂ moves with ψ; None when φ is undetermined."""
        g, inside = self.gradient[rows], self.inside[rows]
        hessian = (g * inside[:, None]).T @ g
        scale = np.sqrt(np.diag(hessian))
        free = scale > 1e-12 * scale.max()  # E = 0 lies on its bound and does not move
        if not free[_PHI]:
            return None
        correlation = hessian[np.ix_(free, free)] / np.outer(scale[free], scale[free])
        if np.linalg.cond(correlation) > 1e13:
            return None
        inverse = np.linalg.inv(correlation)[-1] / scale[free] / scale[_PHI]
        return np.asarray(g[:, free] @ inverse, dtype=float)

    def variance(self, rows: NDArray[np.int64], pull: FloatArray) -> float:
        """Variance of Σ c·ψ over the runs in `rows`."""
        own = float(np.sum(pull**2 * self.own[rows]))
        cells, place = np.unique(self.cells[rows], return_inverse=True)
        together = np.zeros((len(cells), self.shared.shape[1]))
        np.add.at(together, place, pull[:, None] * self.shared[rows])
        return own + float(np.sum(together**2))


def approximate_width(baseline: Sensitivity, rows: NDArray[np.int64]) -> float:
    """Width of the 95 % interval of φ from the runs in `rows`, infinite when undetermined."""
    pull = baseline.pull(rows)
    return np.inf if pull is None else 2 * Z95 * float(np.sqrt(baseline.variance(rows, pull)))


def approximate_delta_width(
    baseline: Sensitivity,
    variant: Sensitivity,
    rows: NDArray[np.int64],
    unlooped: NDArray[np.bool_],
) -> float:
    """Width of the 95 % interval of Δφ when both grids have the runs in `rows`.

    The runs marked in `unlooped` [all runs] are trained once and enter both fits.
    """
    first, second = baseline.pull(rows), variant.pull(rows)
    if first is None or second is None:
        return np.inf
    once = unlooped[rows]
    total = baseline.variance(rows[once], (second - first)[once])
    total += baseline.variance(rows[~once], first[~once])
    total += variant.variance(rows[~once], second[~once])
    return 2 * Z95 * float(np.sqrt(total))


def _clipped_mean(centre: FloatArray, sd: FloatArray, delta: float) -> FloatArray:
    """Mean of clip(x, ±δ) for normal x."""
    sd = np.maximum(sd, 1e-12)
    low, high = (-delta - centre) / sd, (delta - centre) / sd
    density = (np.exp(-0.5 * low**2) - np.exp(-0.5 * high**2)) / np.sqrt(2 * np.pi)
    inside = ndtr(high) - ndtr(low)
    return np.asarray(delta * (ndtr(-high) - ndtr(low)) + centre * inside + sd * density)


def simulate(
    runs: pd.DataFrame,
    law: JointLaw,
    noise: Noise,
    *,
    delta_phi: float | None = None,
    delta: float = 1e-3,
    n_sets: int = 200,
    n_bootstrapped: int = 24,
    resamples: int = 100,
    seed: int = 0,
) -> Forecast:
    """Draw synthetic losses for planned runs, fit each set, bootstrap some.

    With `delta_phi` every set is a pair of tables that share their r = 1 runs, the second under φ +
    Δφ, and resamples draw the same cells in both. `runs` are those of `design.planned_runs`.
    Raises ValueError for runs that identify no law, and for noise as large as the losses.
    """
    if n_sets < 2:
        raise ValueError(
            f"n_sets is {n_sets}, but percentiles need at least 2; 200 is the default."
        )
    laws = [law] if delta_phi is None else [law, replace(law, phi=law.phi + delta_phi)]
    losses = [predict(one, runs) for one in laws]
    _refuse_hopeless(runs, losses[0], noise)
    generator = np.random.default_rng(seed)
    cells = cells_of(runs)
    weights = cells.weights(draw_cells(cells, resamples, seed)[0])
    bootstrapped = n_bootstrapped if len(weights) == resamples else 0
    truth = law.phi if delta_phi is None else delta_phi
    estimates, intervals = [], []
    for number in range(n_sets):
        designs = _synthetic(runs, losses, noise, cells, generator)
        estimates.append(float(_refitted(designs, laws, np.ones((1, len(runs))), delta)[0]))
        if number < bootstrapped:
            draws = _refitted(designs, laws, weights, delta)
            intervals.append(np.percentile(draws, [2.5, 97.5]))
    low, high = (float(end) for end in np.percentile(estimates, [2.5, 97.5]))
    widths = [float(b - a) for a, b in intervals]
    narrow, wide = np.percentile(widths or [np.nan], [10, 90])
    return Forecast(
        of="phi" if delta_phi is None else "delta_phi",
        truth=truth,
        low=low,
        high=high,
        bias=float(np.mean(estimates)) - truth,
        approximate=_approximate(runs, laws, noise, delta),
        expected=float(np.median(widths)) if widths else None,
        expected_range=(float(narrow), float(wide)) if widths else None,
        n_sets=n_sets,
        n_bootstrapped=len(intervals),
        n_covered=sum(bool(a <= truth <= b) for a, b in intervals),
        p_sign=float(np.mean(np.sign(estimates) == np.sign(truth))),
    )


def _refuse_hopeless(runs: pd.DataFrame, loss: FloatArray, noise: Noise) -> None:
    """Refuse runs that identify no law and noise under which a loss may be negative."""
    refuse_unidentifiable(design_of(runs.assign(loss=loss)), None, "the planned grid")
    smallest = float(np.min(loss))
    if noise.run + noise.cell > _LARGEST * smallest:
        raise ValueError(
            f"Noise: run {noise.run:g} and cell {noise.cell:g} nats (--noise-run, --noise-cell) are more "
            f"than {_LARGEST:g} of the smallest loss, {smallest:.3g}. Give standard deviations of a loss in nats."
        )


def _synthetic(
    runs: pd.DataFrame,
    losses: list[FloatArray],
    noise: Noise,
    cells: Cells,
    generator: np.random.Generator,
) -> list[Design]:
    """Draw one table for each list of losses; all share the r = 1 runs of the first."""
    drawn = []
    for loss in losses:
        own = noise.run * generator.normal(size=len(runs))
        shared = noise.cell * generator.normal(size=len(cells))[cells.of_run]
        drawn.append(loss + own + shared)
    unlooped = runs["r"].to_numpy() == 1
    drawn[-1][unlooped] = drawn[0][unlooped]
    return [design_of(runs.assign(loss=values)) for values in drawn]


def _refitted(
    designs: list[Design], laws: list[JointLaw], weights: FloatArray, delta: float
) -> FloatArray:
    """Fit φ, or Δφ of two tables, under every row of `weights`. [R, n] → [R]."""
    phis = [
        solve_resamples(design, weights, start=start, delta=delta)[0][:, _PHI]
        for design, start in zip(designs, laws, strict=True)
    ]
    return phis[0] if len(phis) == 1 else phis[1] - phis[0]


def _approximate(runs: pd.DataFrame, laws: list[JointLaw], noise: Noise, delta: float) -> float:
    """Width of the interval of φ, or of Δφ under two laws, in large samples."""
    rows = np.arange(len(runs))
    first, *others = (Sensitivity.of(runs, law, noise, delta=delta) for law in laws)
    if not others:
        return approximate_width(first, rows)
    return approximate_delta_width(first, others[0], rows, runs["r"].to_numpy() == 1)
