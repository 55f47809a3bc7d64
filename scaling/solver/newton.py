"""Damped Newton for many starts at once, and least absolute deviations as its limit.

Far from the optimum Newton takes the majoriser Jᵀ·diag(w·min(1, δ/|ρ|))·J, near it the exact Hessian; a
Levenberg term on the diagonal is adapted row by row, parameters on a bound are held. Σ w·|ρ| is the
limit of f/δ as δ → 0: optima are followed from δ = 1e-3 downwards by halves (`least_absolute`).
Symbols and shapes as in `objective`.
"""

import numpy as np
from numpy.typing import NDArray

from .laws import FloatArray
from .objective import Derivatives, Design, evaluate, residuals

FIRST_DELTA = 1e-3  # where the way to δ = 0 begins
_HALVINGS = 30  # down to 1e-12: residuals are known to 1e-16
_MAX_STEPS = 150  # most starts need 30 to 70; the rest crawl along a bound, far from the best


def newton(
    design: Design,
    theta: FloatArray,
    weights: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
    delta: float,
) -> tuple[FloatArray, FloatArray]:
    """Damped Newton from every row of `theta` [R, 6] under its row of `weights` [R, n].

    Returns θ [R, 6] and f [R].
    """
    theta = np.clip(theta, lower, upper)
    final_f = np.empty(len(theta))
    rows = np.arange(len(theta))  # rows still moving
    now, w = theta.copy(), weights
    exact = np.zeros(len(rows), dtype=bool)
    damping = np.full(len(rows), 1e-2)
    state = evaluate(design, now, w, delta, exact)
    for _ in range(_MAX_STEPS):
        step = _step(state, now, damping, lower, upper)
        trial = np.clip(now + step, lower, upper)
        gain = -np.einsum("rk,rk->r", state.gradient, trial - now)
        done = (
            (np.abs(gain) <= 1e-13 * state.f + 1e-18 * delta**2 * w.sum(axis=1)) & (damping <= 1e-2)
        ) | (damping > 1e12)
        if done.any():
            theta[rows[done]], final_f[rows[done]] = now[done], state.f[done]
            keep = ~done
            rows, now, w, trial, gain = rows[keep], now[keep], w[keep], trial[keep], gain[keep]
            exact, damping, state = exact[keep], damping[keep], state.rows(keep)
            if not len(rows):
                return theta, final_f
        ahead = evaluate(design, trial, w, delta, exact)
        better = ahead.f < state.f
        small = better & (state.f - ahead.f < 0.01 * state.f)
        # The exact Hessian may be indefinite far out: needing much damping, go back.
        wanted = (exact | small) & ~(exact & ~better & (damping > 1.0))
        damping = np.where(better, np.maximum(damping * 0.2, 1e-12), damping * 8)
        now = np.where(better[:, None], trial, now)
        state = ahead.where(better, state)
        changed = wanted != exact
        exact = wanted
        if changed.any():
            state = state.replaced(
                changed, evaluate(design, now[changed], w[changed], delta, exact[changed])
            )
    theta[rows], final_f[rows] = now, state.f
    return theta, final_f


def _step(
    state: Derivatives, theta: FloatArray, damping: FloatArray, lower: FloatArray, upper: FloatArray
) -> FloatArray:
    """Newton step −(H + λ·diag(M))⁻¹·g with the parameters on a bound held. [R, 6]."""
    held: NDArray[np.bool_] = (
        (lower == upper)
        | ((theta <= lower) & (state.gradient > 0))
        | ((theta >= upper) & (state.gradient < 0))
    )
    gradient = np.where(held, 0.0, state.gradient)
    free = ~held
    hessian = state.hessian * (free[:, :, None] & free[:, None, :])
    largest = np.max(state.majoriser * free, axis=1, keepdims=True)
    floor = np.maximum(largest, np.finfo(float).tiny * 1e20)
    diagonal = damping[:, None] * np.maximum(state.majoriser, 1e-10 * floor) + 1e-15 * floor
    diagonal = np.where(held, floor, diagonal)
    index = np.arange(theta.shape[1])
    hessian[:, index, index] += diagonal
    return np.asarray(-np.linalg.solve(hessian, gradient[..., None])[..., 0], dtype=float)


def least_absolute(
    design: Design,
    theta: FloatArray,
    weights: FloatArray,
    lower: FloatArray,
    upper: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Follow optima of f at `FIRST_DELTA`, rows of `theta` [R, 6], to those of Σ w·|ρ|.

    Returns θ [R, 6] and Σ w·|ρ| [R].
    """
    for halvings in range(1, _HALVINGS + 1):
        theta, _ = newton(design, theta, weights, lower, upper, FIRST_DELTA * 0.5**halvings)
    size = np.abs([residuals(design, row)[0] for row in theta])
    return theta, np.sum(weights * size, axis=1)
