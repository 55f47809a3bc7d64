"""Exact minimiser for laws that share everything but E, one E per group of runs.

f(x) = Σ_i w_i·Huber_δ( LSE(a − α·log N_eff,i, b − β·log D_i, e_g(i)) − log L_i )
x = (a, b, α, β, φ, e_1, …, e_K), a = log A, b = log B, e = log E, logs of N and D centred.

The runs of one group obey the joint law with that group's e, so that `objective.evaluate` gives f, ∇f
and ∇²f group by group; here they are added up. Starts: for fixed exponents the law is linear in the
amplitudes (non-negative least squares of pred/L − 1). Then damped Newton as in `solve`. Shapes: K
groups, n runs, P = 5 + K parameters. Source of f: Schwethelm et al. 2026 (arXiv:2604.21106), eq. 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from .laws import FloatArray
from .objective import Design, evaluate

SHARED = ("A", "B", "alpha", "beta", "phi")
_E = len(SHARED)  # column of the first e
_POLISHED = 8  # grid cells that Newton starts from
_MAX_STEPS = 200
_NOTHING = -800.0  # log of an amplitude whose term is exactly zero
_ZERO_E = 1e-4  # E below this share of the smallest loss counts as zero


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Runs, their groups and the box of the exponents.

    design: the runs, [n]. groups: [n], whole numbers from 0 to K − 1. weights: [n]. alpha: None for
    a law without the term in N. alpha, beta, phi: (lowest, highest); equal values hold a parameter.
    """

    design: Design
    groups: NDArray[np.int64]
    weights: FloatArray
    delta: float
    alpha: tuple[float, float] | None
    beta: tuple[float, float]
    phi: tuple[float, float]

    def __post_init__(self) -> None:
        """Refuse a threshold that is no threshold."""
        if not self.delta > 0:
            raise ValueError(
                f"delta is {self.delta}, but the Huber threshold must be positive here; the paper's "
                "is 1e-3."
            )

    @property
    def n_groups(self) -> int:
        """Number of groups, K."""
        return int(self.groups.max()) + 1

    @property
    def membership(self) -> FloatArray:
        """Which run lies in which group: 1 or 0, [K, n]."""
        return np.asarray(self.groups[None, :] == np.arange(self.n_groups)[:, None], dtype=float)

    def box(self) -> tuple[FloatArray, FloatArray]:
        """Lower and upper bounds of x, [P] each."""
        log_loss = self.design.log_loss
        low, high = log_loss.min() - 15.0, log_loss.max() + 10.0
        a = (_NOTHING, _NOTHING) if self.alpha is None else (low, high)
        pairs = [a, (low, high), self.alpha or (1.0, 1.0), self.beta, self.phi]
        pairs += [(low, float(log_loss.max()))] * self.n_groups
        lower, upper = np.array(pairs, dtype=float).T
        return lower, upper


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedSolution:
    """Best of all starts, in natural units (A = 0 for a law without the term in N).

    x: the parameters in centred logs, [P]. E: one a group. objective: f, sum over runs. condition: of
    the exact Hessian over the free parameters. at_bound: what stopped on a bound ("E[k]" for e_k:
    numerically zero).
    """

    x: FloatArray
    A: float
    alpha: float
    B: float
    beta: float
    phi: float
    E: tuple[float, ...]
    objective: float
    n_starts: int
    n_at_best: int
    condition: float
    at_bound: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    f: float
    gradient: FloatArray  # [P]
    hessian: FloatArray  # [P, P]
    majoriser: FloatArray  # [P]


def solve_grouped(
    problem: Problem,
    *,
    exponents: tuple[Sequence[float], Sequence[float], Sequence[float]],
    polished: int = _POLISHED,
    warm: Sequence[FloatArray] = (),
) -> GroupedSolution:
    """Minimise f from the best cells of an exponent grid (α, β, φ values) and from `warm` points [P]."""
    lower, upper = problem.box()
    starts = [*warm, *_projected(problem, exponents, polished, lower, upper)]
    ends = [_descend(problem, start, lower, upper) for start in starts]
    values = np.array([f for _, f in ends])
    x, f = ends[int(np.argmin(values))]
    free = lower < upper
    on_bound = free & ((x <= lower) | (x >= upper))
    on_bound[_E:] |= x[_E:] < problem.design.log_loss.min() + np.log(_ZERO_E)
    inside = free & ~on_bound
    hessian = state_at(problem, x, exact=True).hessian[np.ix_(inside, inside)]
    names = [*SHARED, *(f"E[{k}]" for k in range(problem.n_groups))]
    a, b, alpha, beta, phi = (float(value) for value in x[:_E])
    scale = float(problem.weights.sum())
    return GroupedSolution(
        x=x,
        A=0.0 if problem.alpha is None else float(np.exp(a + alpha * problem.design.mean_log_n)),
        alpha=alpha,
        B=float(np.exp(b + beta * problem.design.mean_log_d)),
        beta=beta,
        phi=phi,
        E=tuple(float(value) for value in np.exp(x[_E:])),
        objective=f,
        n_starts=len(starts),
        n_at_best=int(np.sum(values <= f * (1 + 1e-9) + 1e-16 * scale)),
        condition=float(np.linalg.cond(hessian)) if inside.any() else float("nan"),
        at_bound=tuple(name for name, hit in zip(names, on_bound, strict=True) if hit),
    )


def log_prediction(problem: Problem, x: FloatArray) -> FloatArray:
    """Log of the predicted losses at x. [P] → [n]."""
    return np.asarray(np.log(_terms(problem, x)[0].sum(axis=0)), dtype=float)


def jacobian(problem: Problem, x: FloatArray) -> FloatArray:
    """Take the derivatives of the log predictions in x. [P] → [n, P]."""
    terms, log_n, slope = _terms(problem, x)
    p_n, p_d, p_e = terms / terms.sum(axis=0)
    columns = [p_n, p_d, -p_n * log_n, -p_d * problem.design.log_d, -x[2] * p_n * slope]
    return np.column_stack([*columns, *(problem.membership * p_e)])


def rank_of(problem: Problem, x: FloatArray) -> tuple[int, int]:
    """Rank of the derivatives at x over the free parameters, and how many those are."""
    lower, upper = problem.box()
    free = jacobian(problem, x)[:, lower < upper]
    lengths = np.linalg.norm(free, axis=0)
    if np.any(lengths == 0):
        return int(np.sum(lengths > 0)), free.shape[1]
    return int(np.linalg.matrix_rank(free / lengths, tol=1e-7)), free.shape[1]


def state_at(problem: Problem, x: FloatArray, *, exact: bool) -> _State:
    """Objective, gradient, Hessian (exact, or the majoriser of `objective.evaluate`) at x [P]."""
    k = problem.n_groups
    theta = np.tile(x[[0, 1, _E, 2, 3, 4]], (k, 1))  # (a, b, e_k, α, β, φ), one row a group
    theta[:, 2] = x[_E:]
    parts = evaluate(
        problem.design,
        theta,
        problem.membership * problem.weights,
        problem.delta,
        np.full(k, exact),
    )
    size = _E + k
    gradient, majoriser, hessian = np.zeros(size), np.zeros(size), np.zeros((size, size))
    for group in range(k):
        at = np.array([0, 1, _E + group, 2, 3, 4])
        gradient[at] += parts.gradient[group]
        majoriser[at] += parts.majoriser[group]
        hessian[np.ix_(at, at)] += parts.hessian[group]
    return _State(f=float(parts.f.sum()), gradient=gradient, hessian=hessian, majoriser=majoriser)


def _terms(problem: Problem, x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Terms A·N^−α, B·D^−β, E [3, n], log N_eff [n] and ∂ log N_eff/∂φ [n]."""
    design = problem.design
    looped = np.exp(x[4] * design.log_r) * design.rec
    n_eff = design.once + looped
    log_n = np.log(n_eff)
    term_e = np.exp(x[_E:])[problem.groups]
    terms = np.stack([np.exp(x[0] - x[2] * log_n), np.exp(x[1] - x[3] * design.log_d), term_e])
    return terms, log_n, looped / n_eff * design.log_r


def _projected(
    problem: Problem,
    exponents: tuple[Sequence[float], Sequence[float], Sequence[float]],
    count: int,
    lower: FloatArray,
    upper: FloatArray,
) -> list[FloatArray]:
    """Best amplitudes at every cell of the exponent grid; the `count` best cells as starts."""
    design = problem.design
    root = np.sqrt(problem.weights)
    scaled = root * np.exp(-design.log_loss)
    groups = problem.membership.T * scaled[:, None]
    found = []
    for phi in exponents[2]:
        log_n = np.log(design.once + np.exp(phi * design.log_r) * design.rec)
        for beta in exponents[1]:
            in_d = np.exp(-beta * design.log_d) * scaled
            for alpha in (1.0,) if problem.alpha is None else exponents[0]:
                in_n = np.zeros_like(in_d) if problem.alpha is None else np.exp(-alpha * log_n)
                columns = np.column_stack([in_n * scaled, in_d, groups])
                amplitudes, misfit = nnls(columns, root)
                logs = np.log(np.maximum(amplitudes, 1e-300))
                start = np.array([logs[0], logs[1], alpha, beta, phi, *logs[2:]])
                found.append((misfit, np.clip(start, lower, upper)))
    found.sort(key=lambda one: one[0])
    return [start for _, start in found[:count]]


def _descend(
    problem: Problem, x: FloatArray, lower: FloatArray, upper: FloatArray
) -> tuple[FloatArray, float]:
    """Damped Newton from one start: the majoriser far out, the exact Hessian near the optimum."""
    x = np.clip(x, lower, upper)
    exact, damping = False, 1e-2
    floor = 1e-24 * float(problem.weights.sum())
    state = state_at(problem, x, exact=exact)
    for _ in range(_MAX_STEPS):
        trial = np.clip(x + _step(state, x, damping, lower, upper), lower, upper)
        gain = float(-state.gradient @ (trial - x))
        if (gain <= 1e-13 * state.f + floor and damping <= 1e-2) or damping > 1e12:
            break
        ahead = state_at(problem, trial, exact=exact)
        better = ahead.f < state.f
        small = better and state.f - ahead.f < 0.01 * state.f
        # The exact Hessian may be indefinite far out: needing much damping, go back.
        wanted = (exact or small) and not (exact and not better and damping > 1.0)
        damping = max(damping * 0.2, 1e-12) if better else damping * 8
        x, state = (trial, ahead) if better else (x, state)
        if wanted != exact:
            exact = wanted
            state = state_at(problem, x, exact=exact)
    return x, state.f


def _step(
    state: _State, x: FloatArray, damping: float, lower: FloatArray, upper: FloatArray
) -> FloatArray:
    """Newton step −(H + λ·diag(M))⁻¹·g with the parameters on a bound held. [P]."""
    free = ~(
        (lower == upper)
        | ((x <= lower) & (state.gradient > 0))
        | ((x >= upper) & (state.gradient < 0))
    )
    step = np.zeros_like(x)
    if not free.any():
        return step
    hessian = state.hessian[np.ix_(free, free)]
    size = max(float(state.majoriser[free].max()), np.finfo(float).tiny * 1e20)
    diagonal = damping * np.maximum(state.majoriser[free], 1e-10 * size) + 1e-15 * size
    step[free] = -np.linalg.solve(hessian + np.diag(diagonal), state.gradient[free])
    return step
