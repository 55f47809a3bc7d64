"""The laws that `criteria` compares, each fitted to a table and refitted to parts of it.

The joint law with φ free or held, Chinchilla's, and the iso-parameter law are one solver's special
cases with other counts (`solve`); the joint law with an E per architecture has its own (`grouped`).
Shapes: n runs, F parts of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..runs.table import RunTable, unlooped_design
from ..solver.grouped import log_prediction
from ..solver.identify import refuse_unidentifiable
from ..solver.laws import FloatArray, JointLaw
from ..solver.objective import Design
from ..solver.solve import RANDOM_STARTS, from_law, solve, solve_resamples
from .iso_parameter import counted
from .per_architecture import floors_problem, solve_floors

FREE, ZERO, ONE = "joint, φ free", "joint, φ = 0", "joint, φ = 1"
ISO, CHINCHILLA = "iso-parameter, r·N", "Chinchilla, own N"
FLOORS = "joint, E per architecture"


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A law fitted to all runs.

    parameters: free ones, without the scale of the errors. objective: f, sum of Huber terms over the
    runs. log_predicted: [n]. refit: kept [F, n], true where a run is in → log predictions of all runs,
    [F, n]; raises ValueError when the kept runs cannot identify the law.
    """

    name: str
    parameters: int
    objective: float
    log_predicted: FloatArray
    refit: Callable[[NDArray[np.bool_]], FloatArray]


def candidates(
    table: RunTable, *, delta: float = 1e-3, n_starts: int = RANDOM_STARTS
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Fit every law that the table allows. Returns them, and a reason for each of the others."""
    whole = unlooped_design(table.runs, counted(table))
    own = unlooped_design(table.runs, table.runs["n"].to_numpy(dtype=float))
    laws: dict[str, tuple[Design, float | None]] = {
        FREE: (table.design, None),
        ZERO: (table.design, 0.0),
        ONE: (table.design, 1.0),
        ISO: (whole, 0.0),
        CHINCHILLA: (own, 0.0),
    }
    found: list[Candidate] = []
    reasons = {}
    for name, (design, phi) in laws.items():
        try:
            found.append(_special(name, design, phi, delta, n_starts, table.source))
        except ValueError as error:
            reasons[name] = str(error)
    try:
        found.append(_floors(table, delta))
    except ValueError as error:
        reasons[FLOORS] = str(error)
    return tuple(found), reasons


def _special(
    name: str, design: Design, phi: float | None, delta: float, n_starts: int, source: str
) -> Candidate:
    best = solve(design, phi=phi, delta=delta, n_starts=n_starts, where=source)

    def refit(kept: NDArray[np.bool_]) -> FloatArray:
        for part in kept:
            refuse_unidentifiable(design.part(part), phi, f"{source}, a part of its runs")
        weights = kept.astype(float)
        theta, _ = solve_resamples(design, weights, start=best.law, phi=phi, delta=delta)
        return np.stack([_log_prediction(design, row) for row in theta])

    return Candidate(
        name=name,
        parameters=6 if phi is None else 5,
        objective=best.objective,
        log_predicted=_predicted(design, best.law),
        refit=refit,
    )


def _predicted(design: Design, law: JointLaw) -> FloatArray:
    return _log_prediction(design, from_law(design, law))


def _log_prediction(design: Design, theta: FloatArray) -> FloatArray:
    """Log of the predicted losses at θ (`solve`) in centred logs. [6] → [n]."""
    a, b, e, alpha, beta, phi = theta
    log_n = np.log(design.once + np.exp(phi * design.log_r) * design.rec)
    terms = np.exp(a - alpha * log_n) + np.exp(b - beta * design.log_d) + np.exp(e)
    return np.asarray(np.log(terms), dtype=float)


def _floors(table: RunTable, delta: float) -> Candidate:
    problem = floors_problem(table, delta=delta)
    best = solve_floors(problem)

    def refit(kept: NDArray[np.bool_]) -> FloatArray:
        out = []
        for part in kept:
            left = floors_problem(table.where(part), delta=delta).n_groups
            if left < problem.n_groups:
                raise ValueError(
                    f"{table.source}, a part of its runs: an architecture has no run left, so that "
                    "its E is not known. Add budgets."
                )
            x = solve_floors(replace(problem, weights=part.astype(float)), (best.x,)).x
            out.append(log_prediction(problem, x))
        return np.stack(out)

    return Candidate(
        name=FLOORS,
        parameters=5 + problem.n_groups,
        objective=best.objective,
        log_predicted=log_prediction(problem, best.x),
        refit=refit,
    )
