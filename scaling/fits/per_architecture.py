"""An E per architecture against one shared E, everything else shared.

L = E_k + A·(N_once + r^φ·N_rec)^−α + B·D^−β. The joint law is the case E_1 = … = E_K. Each
architecture fitted with all five parameters of its own is `subsets.per_architecture`; here only E
differs, so that K − 1 degrees of freedom say whether the runs need it. Symbols as in `laws`; E in nats
per token.

The test is the drop in the robust objective f, 2·(f_shared − f)·E[ψ′]/V, ψ the clipped residual and
V = E[ψ²] (Schrader and Hettmansperger 1980, Biometrika 67), or, where that is larger, the variance of the
cells' sums of ψ per run. The likelihood ratio of Laplace errors, 2n·log(f_shared/f), is given too but
no p is taken from it: simulated on the paper's grid with one true E (250 sets each), it passes the 5 %
point in 14 to 25 % of sets with independent errors and in 60 % when the cells share half of the
variance; the robust test in 1 to 5 % and in 10 %.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import chi2, norm
from scipy.stats import f as fisher

from ..record import Record
from ..runs.kinds import architecture_name, by_architecture
from ..runs.table import RunTable
from ..solver.grouped import GroupedSolution, Problem, log_prediction, rank_of, solve_grouped
from ..solver.laws import FloatArray
from ..solver.solve import RANDOM_STARTS
from ..text import markdown_table, wrap
from .fit import fit_joint, r_squared

_EXPONENTS = (1e-3, 3.0)  # α and β, as in `solve`
_PHI = (-3.0, 3.0)
GRID = (
    tuple(np.geomspace(0.05, 1.2, 8)),
    tuple(np.geomspace(0.05, 1.2, 8)),
    tuple(np.linspace(-0.5, 1.5, 9)),
)


@dataclass(frozen=True, kw_only=True)
class Floor(Record):
    """E of one architecture, nats per token, and its distance to the shared E."""

    r: int
    effective_depth: float | None
    n_runs: int
    E: float
    minus_shared: float


@dataclass(frozen=True, kw_only=True)
class FloorComparison(Record):
    """The joint law with one E per architecture beside the joint law.

    A to phi, objective to at_bound: of the fit with E per architecture; shared_*: of the joint law.
    ratio: 2n·log(f_shared/f). statistic: the robust drop, about χ² with `dof` degrees of freedom if one
    E is enough; p: its tail, by F(dof, n_cells − 1) where the (budget, r) cells are known (n_cells None
    otherwise: independent runs assumed). predicted: losses under E per architecture, by `run_ids`.
    """

    split: str
    phi_fixed: float | None
    floors: tuple[Floor, ...]
    A: float
    alpha: float
    B: float
    beta: float
    phi: float
    objective: float
    r2: float
    rmse: float
    condition: float
    at_bound: tuple[str, ...]
    shared_E: float
    shared_phi: float
    shared_objective: float
    shared_r2: float
    shared_rmse: float
    ratio: float
    statistic: float
    dof: int
    n_cells: int | None
    p: float
    run_ids: tuple[str, ...] = field(repr=False)
    predicted: tuple[float, ...] = field(repr=False)

    @property
    def spread(self) -> float:
        """Largest minus smallest E, nats."""
        values = [floor.E for floor in self.floors]
        return max(values) - min(values)


def fit_floors(
    table: RunTable,
    *,
    phi: float | None = None,
    delta: float = 1e-3,
    n_starts: int = RANDOM_STARTS,
) -> FloorComparison:
    """Fit the joint law with an E per architecture, and with one E, to the same runs.

    `phi` holds φ in both. `n_starts` are the random starts of the joint law. Raises ValueError for
    a single architecture and for designs that cannot tell the E apart.
    """
    problem = floors_problem(table, phi=phi, delta=delta)
    shared = fit_joint(table, phi=phi, delta=delta, n_starts=n_starts)
    solution = solve_floors(problem)
    predicted = np.exp(log_prediction(problem, solution.x))
    observed = table.runs["loss"].to_numpy(dtype=float)
    residual = observed - predicted
    dof = problem.n_groups - 1
    cells = _cells(table.runs)
    statistic = robust_drop(
        np.log(predicted / observed), shared.objective - solution.objective, delta, cells
    )
    floors = tuple(
        Floor(r=r, effective_depth=depth, n_runs=len(runs), E=e, minus_shared=e - shared.law.E)
        for (r, depth, runs), e in zip(by_architecture(table.runs), solution.E, strict=True)
    )
    return FloorComparison(
        split=table.split,
        phi_fixed=phi,
        floors=floors,
        A=solution.A,
        alpha=solution.alpha,
        B=solution.B,
        beta=solution.beta,
        phi=solution.phi,
        objective=solution.objective,
        r2=r_squared(residual, observed),
        rmse=float(np.sqrt(np.mean(residual**2))),
        condition=solution.condition,
        at_bound=solution.at_bound,
        shared_E=shared.law.E,
        shared_phi=shared.law.phi,
        shared_objective=shared.objective,
        shared_r2=shared.r2,
        shared_rmse=shared.rmse,
        ratio=2 * len(table) * float(np.log(shared.objective / solution.objective)),
        statistic=statistic,
        dof=dof,
        n_cells=None if cells is None else int(cells.max()) + 1,
        p=_tail(statistic, dof, cells),
        run_ids=tuple(table.runs["run_id"]),
        predicted=tuple(float(value) for value in predicted),
    )


def robust_drop(
    residual: FloatArray, drop: float, delta: float, cells: NDArray[np.int64] | None
) -> float:
    """Standardise a drop of the objective, 2·drop·E[ψ′]/V, ψ the log residual [n] clipped at ±δ.

    E[ψ′] is the share of runs within δ, smoothed by a Gaussian kernel (Silverman's width), because few
    of a grid's runs lie there.
    """
    psi = np.clip(residual, -delta, delta)
    variance = float(np.mean(psi**2))
    if cells is not None:
        variance = max(variance, float(np.sum(np.bincount(cells, psi) ** 2)) / len(residual))
    if variance == 0:  # the runs lie on the law exactly
        return float("inf") if drop > 0 else 0.0
    width = 1.06 * float(np.std(residual)) * len(residual) ** -0.2
    inside = norm.cdf((delta - residual) / width) - norm.cdf((-delta - residual) / width)
    return 2 * drop * float(np.mean(inside)) / variance


def _cells(runs: pd.DataFrame) -> NDArray[np.int64] | None:
    """Take the number of each run's (budget, r) cell; None without budgets or with a single cell."""
    if "budget_flops" not in runs or runs["budget_flops"].isna().any():
        return None
    cells = np.asarray(runs.groupby(["budget_flops", "r"]).ngroup(), dtype=np.int64)
    return cells if cells.max() > 0 else None


def _tail(statistic: float, dof: int, cells: NDArray[np.int64] | None) -> float:
    value = max(statistic, 0.0)
    if cells is None:
        return float(chi2.sf(value, dof))
    return float(fisher.sf(value / dof, dof, int(cells.max())))


def floors_problem(table: RunTable, *, phi: float | None = None, delta: float = 1e-3) -> Problem:
    """Set the fit up, or raise ValueError naming what the design lacks."""
    groups, names = _groups(table.runs)
    if len(names) < 2:
        raise ValueError(
            f"{table.source}: all runs are of one architecture ({names[0]}), so that an E per "
            "architecture is the shared E. Add runs at another r."
        )
    problem = Problem(
        design=table.design,
        groups=groups,
        weights=np.ones(len(table)),
        delta=delta,
        alpha=_EXPONENTS,
        beta=_EXPONENTS,
        phi=_PHI if phi is None else (phi, phi),
    )
    for k, name in enumerate(names):
        sizes = table.runs.loc[groups == k, "n"].nunique()
        if sizes < 2:
            raise ValueError(
                f"{table.source}: {name} has {sizes} parameter count, but its own E and the shared "
                "A·N^−α need at least 2 to be told apart. Add a width at this r, or leave it out."
            )
    rank, parameters = rank_of(problem, _typical(problem, phi))
    if rank < parameters:
        raise ValueError(
            f"{table.source}: the {len(table)} runs' (N, r, D) leave a combination of the "
            f"{parameters} parameters (E for each of {len(names)} architectures, and the shared ones) "
            "undetermined. Add widths or budgets, or hold phi."
        )
    return problem


def solve_floors(problem: Problem, warm: tuple[FloatArray, ...] = ()) -> GroupedSolution:
    """Minimise; with points to start from (a refit of nearly the same runs) on a coarser grid."""
    lower, upper = problem.phi
    phis = (lower,) if lower == upper else GRID[2]
    if not warm:
        return solve_grouped(problem, exponents=(GRID[0], GRID[1], phis))
    coarse = (GRID[0][1::3], GRID[1][1::3], phis[1::3] or phis)
    return solve_grouped(problem, exponents=coarse, polished=2, warm=warm)


def render_floors(found: FloorComparison) -> str:
    """Write a table of the E and one sentence on what they are worth."""
    rows = [
        [
            architecture_name(one.r, one.effective_depth),
            f"{one.n_runs}",
            f"{one.E:.4f}",
            f"{one.minus_shared:+.4f}",
        ]
        for one in found.floors
    ]
    header = ["architecture", "runs", "E, nats", "E − shared E"]
    return f"{markdown_table(header, rows)}\n\n{wrap(says(found))}"


def says(found: FloorComparison) -> str:
    """One sentence: whether the runs need an E per architecture."""
    numbers = (
        f"E per architecture spreads over {found.spread:.3f} nats around the shared "
        f"{found.shared_E:.3f}; RMSE {found.shared_rmse:.4f} → {found.rmse:.4f} nats, φ "
        f"{found.shared_phi:.3f} → {found.phi:.3f}; robust test {found.statistic:.1f} on "
        f"{found.dof} degrees of freedom, p = {found.p:.2g} ({_assumed(found)})"
    )
    verdict = (
        "One shared E is enough for these runs"
        if found.p > 0.05
        else "These runs ask for more than one shared E"
    )
    return f"{verdict}: {numbers}."


def _assumed(found: FloorComparison) -> str:
    if found.n_cells is None:
        return "independent runs assumed"
    return f"{found.n_cells} cells"


def _groups(runs: pd.DataFrame) -> tuple[np.ndarray, list[str]]:
    """Architecture number of every run, and the names."""
    groups = np.zeros(len(runs), dtype=np.int64)
    names = []
    for k, (r, depth, part) in enumerate(by_architecture(runs)):
        groups[runs.index.isin(part.index)] = k
        names.append(architecture_name(r, depth))
    return groups, names


def _typical(problem: Problem, phi: float | None) -> FloatArray:
    """Parameters at which the terms share the loss, for the rank of the design."""
    level = float(np.mean(problem.design.log_loss)) - 0.7
    shared = [level - 0.7, level - 0.7, 0.3, 0.35, 0.5 if phi is None else phi]
    return np.array([*shared, *([level] * problem.n_groups)])
