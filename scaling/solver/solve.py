"""Exact minimiser of the joint law's Huber objective: projected starts, then batched Newton.

f(θ) = Σ_i w_i·Huber_δ( LSE(a − α·log N_eff,i, b − β·log D_i, e) − log L_i )   (eq. 4)
N_eff = N_once + r^φ·N_rec

Symbols follow Schwethelm et al. 2026 (arXiv:2604.21106); a = log A, b = log B, e = log E;
θ = (a, b, e, α, β, φ). Log N and log D are centred on the table, so that a and b are the logs of
the terms at the mean run: the Hessian is better conditioned by orders of magnitude.
Shapes: R rows solved at once (start × weights), n runs, G exponent triples.

1. For fixed (α, β, φ) the law is linear in (E, A, B), and pred/L − 1 is the log residual to first
   order: weighted least squares gives amplitudes close to the optimum (`project`).
2. Damped Newton takes all starts down at once (`newton`), in a large table on a few of its runs
   first (`thin`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .identify import refuse_unidentifiable
from .laws import FloatArray, JointLaw
from .newton import FIRST_DELTA, least_absolute, newton
from .objective import NAMES, Design, evaluate
from .thin import search_runs

RANDOM_STARTS = 500
GRID_STARTS = 12
_EXPONENTS = (1e-3, 3.0)  # α and β
_PHI = (-3.0, 3.0)  # the paper's start box
_ZERO_E = 1e-4  # E below this share of the smallest loss counts as zero
_POLISHED = 4  # ends on a large table's few runs that go on to all of them
_AT_ONCE = 2e7  # weights of a large table's resamples: 160 MB


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Best of all starts.

    objective: f at the optimum (sum over runs). n_at_best: starts that end within 1e-9 (relative)
    of it; in a large table those whose end on its few runs (`thin`) leads there. condition:
    condition number of the exact Hessian over the free parameters (logs centred). at_bound:
    parameters that stopped on their bound (E: numerically zero).
    """

    law: JointLaw
    objective: float
    n_starts: int
    n_at_best: int
    condition: float
    at_bound: tuple[str, ...]


def solve(
    design: Design,
    *,
    phi: float | None = None,
    delta: float = 1e-3,
    weights: FloatArray | None = None,
    n_starts: int = RANDOM_STARTS,
    seed: int = 0,
    where: str = "the run table",
) -> Solution:
    """Minimise f over all parameters, or over all but φ when `phi` is given.

    `weights` [n] multiply the runs' terms (default 1). `delta` = 0 takes Σ w·|ρ|. Raises ValueError
    when the design cannot identify the parameters. Source: Schwethelm et al. 2026, eq. 4 and appendix (Huber δ = 1e-3,
    best of 500 restarts).
    """
    if not 0 <= delta < np.inf:
        raise ValueError(
            f"delta is {delta}, but the Huber threshold must be a positive number (the paper's is 1e-3), or 0 for "
            "least absolute deviations."
        )
    refuse_unidentifiable(design, phi, where)
    w = np.ones((1, design.n)) if weights is None else np.asarray(weights, dtype=float)[None]
    lower, upper = bounds(design, phi)
    search = search_runs(design, w)
    starts = np.concatenate(
        [
            _random_starts(search.design, search.weights, phi, n_starts, seed),
            grid_starts(search.design, search.weights, phi, GRID_STARTS)[0],
        ]
    )
    first = delta or FIRST_DELTA
    everywhere = np.broadcast_to(search.weights, (len(starts), search.design.n))
    theta, f, count = _ends(*newton(search.design, starts, everywhere, lower, upper, first))
    if not search.whole:
        theta, count = theta[:_POLISHED], count[:_POLISHED]
    everywhere = np.broadcast_to(w, (len(theta), design.n))
    if not search.whole:
        theta, f = newton(design, theta, everywhere, lower, upper, first)
    if delta == 0:
        theta, f = least_absolute(design, theta, everywhere, lower, upper)
    best = int(np.argmin(f))
    scale = float(w.sum()) * (delta or 1.0)
    free = lower < upper
    hessian = _curvature(design, theta[best], w, delta)
    on_bound = free & ((theta[best] <= lower) | (theta[best] >= upper))
    on_bound[2] |= theta[best, 2] < design.log_loss.min() + np.log(_ZERO_E)
    inside = free & ~on_bound
    return Solution(
        law=to_law(design, theta[best]),
        objective=float(f[best]),
        n_starts=len(starts),
        n_at_best=int(count[f <= f[best] * (1 + 1e-9) + 1e-13 * scale].sum()),
        condition=float(np.linalg.cond(hessian[np.ix_(inside, inside)])),
        at_bound=tuple(name for name, hit in zip(NAMES, on_bound, strict=True) if hit),
    )


def _ends(theta: FloatArray, f: FloatArray) -> tuple[FloatArray, FloatArray, NDArray[np.intp]]:
    """Different ends [K, 6] of starts [R, 6], lowest f first, and how many starts met in each [K]."""
    order = np.argsort(f, kind="stable")
    _, lowest, count = np.unique(
        np.round(np.log(f[order] + 1e-300), 9), return_index=True, return_counts=True
    )
    return theta[order[lowest]], f[order[lowest]], count


def _curvature(design: Design, theta: FloatArray, weights: FloatArray, delta: float) -> FloatArray:
    """Hessian of f at one θ [6]; for delta = 0 Gauss and Newton's of the squared residuals. [6, 6]."""
    exact = np.full(1, delta > 0)
    hessian: FloatArray = evaluate(design, theta[None], weights, delta or 1e3, exact).hessian[0]
    return hessian


def solve_resamples(
    design: Design,
    weights: FloatArray,
    *,
    start: JointLaw,
    phi: float | None = None,
    delta: float = 1e-3,
) -> tuple[FloatArray, FloatArray]:
    """Minimise f once per row of `weights` [R, n].

    Starts are the two best cells of the exponent grid and the law `start`. Returns the
    parameters θ [R, 6] in the design's centred logs (`to_law` converts) and the objectives [R].
    """
    lower, upper = bounds(design, phi)
    first = delta or FIRST_DELTA
    search = search_runs(design, weights)
    rows = len(weights)
    warm = np.broadcast_to(from_law(design, start), (rows, 1, len(NAMES)))
    cells = grid_starts(search.design, search.weights, phi, 2)
    starts = np.concatenate([cells, warm], axis=1)  # [R, 3, 6]
    tries = starts.shape[1]
    theta, each = starts.reshape(rows * tries, -1), np.repeat(search.weights, tries, axis=0)
    theta, f = newton(search.design, theta, each, lower, upper, first)
    if search.whole and delta == 0:
        theta, f = least_absolute(design, theta, each, lower, upper)
    best = np.argmin(f.reshape(rows, tries), axis=1) + tries * np.arange(rows)
    theta, f = theta[best], f[best]
    if search.whole:
        return theta, f
    at_once = max(1, int(_AT_ONCE // design.n))
    for part in (slice(at, at + at_once) for at in range(0, rows, at_once)):
        theta[part], f[part] = newton(design, theta[part], weights[part], lower, upper, first)
        if delta == 0:
            theta[part], f[part] = least_absolute(design, theta[part], weights[part], lower, upper)
    return theta, f


def bounds(design: Design, phi: float | None) -> tuple[FloatArray, FloatArray]:
    """Box of θ, [6] each; a fixed φ is a box of width zero.

    The terms may fall to 3e-7 of the smallest loss (E = 0).
    """
    low, high = design.log_loss.min() - 15.0, design.log_loss.max() + 10.0
    phi_low, phi_high = _PHI if phi is None else (phi, phi)
    lower = np.array([low, low, low, _EXPONENTS[0], _EXPONENTS[0], phi_low])
    upper = np.array([high, high, design.log_loss.max(), _EXPONENTS[1], _EXPONENTS[1], phi_high])
    return lower, upper


def to_law(design: Design, theta: FloatArray) -> JointLaw:
    """Law in natural units from θ [6] in centred logs."""
    a, b, e, alpha, beta, phi = (float(value) for value in theta)
    return JointLaw(
        E=float(np.exp(e)),
        A=float(np.exp(a + alpha * design.mean_log_n)),
        alpha=alpha,
        B=float(np.exp(b + beta * design.mean_log_d)),
        beta=beta,
        phi=phi,
    )


def from_law(design: Design, law: JointLaw) -> FloatArray:
    """θ [6] in centred logs from a law in natural units, the inverse of `to_law`."""
    a = np.log(law.A) - law.alpha * design.mean_log_n
    b = np.log(law.B) - law.beta * design.mean_log_d
    return np.array([a, b, np.log(max(law.E, 1e-300)), law.alpha, law.beta, law.phi])


def project(
    design: Design, weights: FloatArray, alpha: FloatArray, beta: FloatArray, phi: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Best amplitudes for fixed exponents [G] under the rows of `weights` [R, n].

    Minimises Σ w·((E + A·x + B·y)/L − 1)², x = N_eff^−α, y = D^−β, by Cramer's rule. Returns θ [R,
    G, 6] and the sum [R, G], infinite where an amplitude comes out negative (such a θ gets a small
    positive one).
    """
    n_eff = design.once + np.exp(phi[:, None] * design.log_r) * design.rec  # [G, n]
    inverse = np.exp(-design.log_loss)
    one = np.broadcast_to(inverse, n_eff.shape)
    x = n_eff ** -alpha[:, None] * inverse
    y = np.exp(-beta[:, None] * design.log_d) * inverse
    columns = {
        "11": one * one,
        "1x": one * x,
        "1y": one * y,
        "xx": x * x,
        "xy": x * y,
        "yy": y * y,
        "1": one,
        "x": x,
        "y": y,
    }
    s = {name: weights @ column.T for name, column in columns.items()}  # [R, G]
    cofactor_1 = s["xx"] * s["yy"] - s["xy"] ** 2
    cofactor_x = s["1y"] * s["xy"] - s["1x"] * s["yy"]
    cofactor_y = s["1x"] * s["xy"] - s["1y"] * s["xx"]
    cofactor_xx = s["11"] * s["yy"] - s["1y"] ** 2
    cofactor_xy = s["1x"] * s["1y"] - s["11"] * s["xy"]
    cofactor_yy = s["11"] * s["xx"] - s["1x"] ** 2
    determinant = s["11"] * cofactor_1 + s["1x"] * cofactor_x + s["1y"] * cofactor_y
    determinant = np.where(determinant > 0, determinant, np.inf)
    big_e = (cofactor_1 * s["1"] + cofactor_x * s["x"] + cofactor_y * s["y"]) / determinant
    big_a = (cofactor_x * s["1"] + cofactor_xx * s["x"] + cofactor_xy * s["y"]) / determinant
    big_b = (cofactor_y * s["1"] + cofactor_xy * s["x"] + cofactor_yy * s["y"]) / determinant
    misfit = weights.sum(axis=1)[:, None] - big_e * s["1"] - big_a * s["x"] - big_b * s["y"]
    valid = (big_e > 0) & (big_a > 0) & (big_b > 0)
    floor = 0.01 * float(np.exp(design.log_loss.min()))
    amplitudes = [np.log(np.maximum(value, floor)) for value in (big_a, big_b, big_e)]
    exponents = [np.broadcast_to(value, misfit.shape) for value in (alpha, beta, phi)]
    return np.stack(amplitudes + exponents, axis=-1), np.where(valid, misfit, np.inf)


def grid_starts(design: Design, weights: FloatArray, phi: float | None, top: int) -> FloatArray:
    """Take the `top` best cells of an exponent grid, by projection: [R, top, 6].

    `weights` [R, n] are the runs' weights of every row.
    """
    exponents = np.geomspace(0.05, 1.2, 8)
    phis = np.linspace(-0.5, 1.5, 9) if phi is None else np.array([phi])
    alpha, beta, grid_phi = (
        axis.ravel() for axis in np.meshgrid(exponents, exponents, phis, indexing="ij")
    )
    theta, misfit = project(design, weights, alpha, beta, grid_phi)
    order = np.argsort(misfit, axis=1, kind="stable")[:, :top]
    return np.asarray(np.take_along_axis(theta, order[..., None], axis=1), dtype=float)


def _random_starts(
    design: Design, weights: FloatArray, phi: float | None, count: int, seed: int
) -> FloatArray:
    """Exponents uniform in α, β ∈ [0.05, 1.5], φ ∈ [−1, 2], amplitudes projected. [count, 6]."""
    generator = np.random.default_rng(seed)
    alpha, beta = generator.uniform(0.05, 1.5, (2, count))
    phis = generator.uniform(-1.0, 2.0, count) if phi is None else np.full(count, float(phi))
    return np.asarray(project(design, weights, alpha, beta, phis)[0][0], dtype=float)
