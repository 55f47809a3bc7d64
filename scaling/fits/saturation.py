"""What further recurrences at test time buy: L(T) = L∞ + Z·exp(−z·T/μ).

T recurrences at test time, μ mean recurrence in training, L loss in nats per token; L∞ the floor,
Z·exp(−z·T/μ) what is left above it. Each run alone (L∞, Z and z its own) and all runs pooled (L∞
of each run, one Z and one z, as in Parcae's unified law, whose floor is the training law at μ and D).
Source: Prairie et al. 2026 (arXiv:2604.12946); they find that L∞ is about the loss at T = μ.

The law is the joint law's E + B·D^−β with log D = T/μ, β = z, B = Z and without the term in N, so that
`grouped` fits it under the same objective, Huber(δ) on log loss.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..record import Record
from ..runs.evaluations import checked_points, source_of
from ..solver.grouped import GroupedSolution, Problem, log_prediction, rank_of, solve_grouped
from ..solver.laws import Array
from ..solver.objective import Design
from ..text import NONE, bullets, markdown_table, wrap
from .fit import r_squared

_RATES = (1e-2, 50.0)  # z: slower is a straight line over the tested T, faster is over at once
_POLISHED = 24  # a noisy curve of few points has several minima
_GRID = ((1.0,), tuple(np.geomspace(0.02, 40.0, 48)), (0.0,))


@dataclass(frozen=True, kw_only=True)
class SaturatingLaw(Record):
    """L(T) = L_inf + Z·exp(−z·T/μ); L_inf and Z in nats per token, z without unit."""

    L_inf: float
    Z: float
    z: float

    def loss(self, test_recurrences: Array, mu: Array) -> Array:
        """Predicted loss, nats per token. [n], [n] → [n].

        >>> law = SaturatingLaw(L_inf=2.5, Z=1.0, z=3.0)
        >>> round(float(law.loss(4, 4)), 3), round(float(law.loss(8, 4)), 3)
        (2.55, 2.502)
        """
        return self.L_inf + self.Z * np.exp(-self.z * test_recurrences / mu)

    @property
    def left_at_mu(self) -> float:
        """What more recurrences could still gain over T = μ, Z·exp(−z), nats."""
        return float(self.Z * np.exp(-self.z))


@dataclass(frozen=True, kw_only=True)
class RunCurve(Record):
    """One run. law: None when its own T cannot identify it, `reason` says why; pooled: with shared Z, z.

    warnings: sentences on what the fit of its own leaves loose.
    """

    run_id: str
    mu: float
    n_points: int
    law: SaturatingLaw | None
    rmse: float | None
    pooled: SaturatingLaw | None
    pooled_rmse: float | None
    reason: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class SaturationFit(Record):
    """Curves of all runs. Z, z, r2, rmse: of the pooled fit, None where it cannot be had (`reason`).

    own_rmse: of the runs' own fits, over the runs that have one. condition, at_bound: of the pooled
    fit. points: run_id, mu, test_recurrences, loss, predicted (pooled; NaN without).
    """

    loss: str
    curves: tuple[RunCurve, ...]
    Z: float | None
    z: float | None
    r2: float | None
    rmse: float | None
    own_rmse: float | None
    objective: float | None
    condition: float | None
    at_bound: tuple[str, ...]
    delta: float
    reason: str | None
    points: pd.DataFrame = field(repr=False)


def fit_saturation(
    frame: pd.DataFrame, *, loss: str = "val_loss", mu: str = "recurrences", delta: float = 1e-3
) -> SaturationFit:
    """Fit the law to a table of one row per (run_id, test_recurrences).

    `loss` is the column of losses, nats per token; `mu` that of the mean trained recurrence, constant
    within a run. A run whose T cannot identify its own law keeps the reason and enters the pooled
    fit; when the pooled design cannot identify Z and z either, that is None with a reason. Raises
    ValueError for a bad table, and when neither any run nor the pool can be fitted.
    """
    points = checked_points(frame, loss, mu)
    ids = list(dict.fromkeys(points["run_id"]))
    pooled, reason = _pooled(points, ids, delta)
    predicted = np.full(len(points), np.nan)
    if pooled is not None:
        predicted = np.exp(log_prediction(_problem(points, ids, delta), pooled.x))
    points = points.assign(predicted=predicted)
    curves = tuple(
        _curve(points[points["run_id"] == one], pooled, k, delta) for k, one in enumerate(ids)
    )
    if pooled is None and all(curve.law is None for curve in curves):
        raise ValueError(f"{source_of(frame)}: {curves[0].reason}; pooled: {reason}")
    residual, observed = points["loss"].to_numpy() - predicted, points["loss"].to_numpy()
    own = [(curve.rmse**2, curve.n_points) for curve in curves if curve.rmse is not None]
    return SaturationFit(
        loss=loss,
        curves=curves,
        Z=None if pooled is None else pooled.B,
        z=None if pooled is None else pooled.beta,
        r2=None if pooled is None else r_squared(residual, observed),
        rmse=None if pooled is None else float(np.sqrt(np.mean(residual**2))),
        own_rmse=float(np.sqrt(sum(s * n for s, n in own) / sum(n for _, n in own)))
        if own
        else None,
        objective=None if pooled is None else pooled.objective,
        condition=None if pooled is None else pooled.condition,
        at_bound=() if pooled is None else tuple(_named(one, ids) for one in pooled.at_bound),
        delta=delta,
        reason=reason,
        points=points,
    )


def _problem(points: pd.DataFrame, ids: list[str], delta: float) -> Problem:
    """Write the law as the joint law without the term in N: log D = T/μ."""
    turns = (points["test_recurrences"] / points["mu"]).to_numpy(dtype=float)
    first = float(turns.min())  # where the term is largest, so that its bounds mean something
    n = len(points)
    number = {run: k for k, run in enumerate(ids)}
    return Problem(
        design=Design(
            once=np.ones(n),
            rec=np.zeros(n),
            log_r=np.zeros(n),
            log_d=turns - first,
            log_loss=np.log(points["loss"].to_numpy(dtype=float)),
            log_c=np.zeros(n),
            mean_log_n=0.0,
            mean_log_d=first,
        ),
        groups=np.array([number[run] for run in points["run_id"]], dtype=np.int64),
        weights=np.ones(n),
        delta=delta,
        alpha=None,
        beta=_RATES,
        phi=(0.0, 0.0),
    )


def _pooled(
    points: pd.DataFrame, ids: list[str], delta: float
) -> tuple[GroupedSolution | None, str | None]:
    problem = _problem(points, ids, delta)
    reason = _unidentified(points, problem)
    return (
        (None, reason)
        if reason
        else (solve_grouped(problem, exponents=_GRID, polished=_POLISHED), None)
    )


def _unidentified(points: pd.DataFrame, problem: Problem) -> str | None:
    """Name what a design lacks for the L∞ of its runs, Z and z; None when it lacks nothing."""
    turns = (points["test_recurrences"] / points["mu"]).round(9).nunique()
    who = points["run_id"].iloc[0] if problem.n_groups == 1 else f"{problem.n_groups} runs"
    if turns < 3:
        return (
            f"{who}: {turns} different T/μ, but L∞, Z and z need at least 3. Evaluate at "
            "more recurrences"
        )
    log_loss = problem.design.log_loss
    level = float(log_loss.mean())
    x = np.array([-800.0, level - 2.0, 1.0, 1.0, 0.0, *([level] * problem.n_groups)])
    rank, parameters = rank_of(problem, x)
    if rank < parameters:
        return (
            f"{who}: {len(points)} points leave a combination of the {parameters} parameters (L∞ of "
            "every run, Z and z) undetermined, because too few runs were evaluated at several T. "
            "Evaluate the same runs at more recurrences"
        )
    first = points.groupby("run_id", sort=False)["loss"].agg(["first", "last"])
    if (first["last"] >= first["first"]).all():
        return (
            f"{who}: the loss at the most recurrences is not below that at the fewest, so that "
            "there is no decay to fit. Evaluate at fewer recurrences than trained as well"
        )
    return None


def _curve(points: pd.DataFrame, pooled: GroupedSolution | None, k: int, delta: float) -> RunCurve:
    run_id, mu = str(points["run_id"].iloc[0]), float(points["mu"].iloc[0])
    own, reason = _pooled(points, [run_id], delta)
    law = None if own is None else SaturatingLaw(L_inf=own.E[0], Z=own.B, z=own.beta)
    together = (
        None if pooled is None else SaturatingLaw(L_inf=pooled.E[k], Z=pooled.B, z=pooled.beta)
    )
    rmse = None if law is None else _rmse(law, points)
    return RunCurve(
        run_id=run_id,
        mu=mu,
        n_points=len(points),
        law=law,
        rmse=rmse,
        pooled=together,
        pooled_rmse=None if together is None else _rmse(together, points),
        reason=reason,
        warnings=() if law is None or own is None else _loose(law, own, points, rmse or 0.0),
    )


def _loose(
    law: SaturatingLaw, solution: GroupedSolution, points: pd.DataFrame, rmse: float
) -> tuple[str, ...]:
    """Say what the tested T leave loose in a run's own fit."""
    turns = (points["test_recurrences"] / points["mu"]).to_numpy(dtype=float)
    left = law.Z * np.exp(-law.z * turns)
    out = []
    if solution.at_bound:
        names = ", ".join(
            _named(name, [str(points["run_id"].iloc[0])]) for name in solution.at_bound
        )
        out.append(f"{names} stopped on a bound: these T do not determine it")
    if len(points) == 3:
        out.append("3 points for 3 parameters: the curve goes through all of them")
    if left[-1] > 0.5 * (left[0] - left[-1]):
        out.append(
            f"L∞ is extrapolated: {left[-1]:.3f} nats are left above it at the largest T, "
            f"{left[0] - left[-1]:.3f} fell away over the tested T"
        )
    if left[0] - left[-1] < 2 * rmse:
        out.append(
            f"the fall over the tested T, {left[0] - left[-1]:.4f} nats, is under twice the RMSE"
        )
    return tuple(out)


def _named(name: str, ids: list[str]) -> str:
    """Name a parameter of the solver in the law's symbols."""
    if name.startswith("E["):
        return f"L∞ of {ids[int(name[2:-1])]}"
    return {"B": "Z", "beta": "z"}[name]


def _rmse(law: SaturatingLaw, points: pd.DataFrame) -> float:
    turns, mu = (points[name].to_numpy(dtype=float) for name in ("test_recurrences", "mu"))
    residual = points["loss"].to_numpy(dtype=float) - law.loss(turns, mu)
    return float(np.sqrt(np.mean(residual**2)))


def render_saturation(found: SaturationFit) -> str:
    """Write a table of the runs' own laws, the pooled law, and what is loose."""
    header = ["run", "μ", "points", "L∞", "Z", "z", "RMSE", "gain left at T = μ", "RMSE, pooled"]
    rows, notes = [], []
    for one in found.curves:
        law, own = one.law, [NONE] * 5
        if law is not None:
            own = [f"{law.L_inf:.4f}", f"{law.Z:.4g}", f"{law.z:.3f}"]
            own += [f"{one.rmse:.4f}", f"{law.left_at_mu:.4f}"]
        pooled = NONE if one.pooled_rmse is None else f"{one.pooled_rmse:.4f}"
        rows.append([one.run_id, f"{one.mu:g}", f"{one.n_points}", *own, pooled])
        notes += [f"{one.run_id}: {text}." for text in one.warnings]
        if one.reason is not None:
            notes.append(f"no law for {one.reason}.")
    return "\n\n".join(
        part for part in (markdown_table(header, rows), bullets(notes), wrap(says(found))) if part
    )


def says(found: SaturationFit) -> str:
    """One sentence: the pooled law beside the runs' own."""
    if found.Z is None or found.z is None or found.rmse is None or found.r2 is None:
        return f"No pooled law: {found.reason}."
    text = (
        f"Pooled, L = L∞ + {found.Z:.4g}·exp(−{found.z:.3f}·T/μ) with an L∞ per run: R² {found.r2:.4f}, "
        f"RMSE {found.rmse:.4f} nats"
    )
    if found.own_rmse is not None:
        text += f" ({found.own_rmse:.4f} with Z and z of every run's own)"
    left = found.Z * float(np.exp(-found.z))
    bound = f". {', '.join(found.at_bound)} stopped on a bound" if found.at_bound else ""
    return f"{text}; at T = μ more recurrences could still gain {left:.4f} nats{bound}."
