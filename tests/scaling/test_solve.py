"""Derivatives against finite differences, the optimum against scipy, invariances."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from scaling.runs.table import RunTable
from scaling.solver.objective import Design, evaluate
from scaling.solver.solve import from_law, solve, solve_resamples, to_law


@pytest.fixture(scope="module")
def design(request):
    frame = request.getfixturevalue("_paper")
    return RunTable.of(frame).design


def naive_objective(theta, design, weights, delta):
    """Eq. 4 as written, run by run, in logs."""
    a, b, e, alpha, beta, phi = theta
    total = 0.0
    for i in range(design.n):
        n_eff = design.once[i] + np.exp(design.log_r[i]) ** phi * design.rec[i]
        terms = [a - alpha * np.log(n_eff), b - beta * design.log_d[i], e]
        residual = np.logaddexp.reduce(terms) - design.log_loss[i]
        size = abs(residual)
        total += weights[i] * (0.5 * size**2 if size <= delta else delta * (size - 0.5 * delta))
    return total


@pytest.fixture(scope="module")
def points(design):
    """Parameter rows around the optimum and far from it, with uneven weights."""
    generator = np.random.default_rng(3)
    middle = np.array([0.2, -0.7, 0.45, 0.2, 0.37, 0.45])
    theta = middle + generator.normal(size=(5, 6)) * np.array([0.2, 0.2, 0.1, 0.05, 0.05, 0.2])
    return theta, generator.uniform(0.5, 2.0, size=(5, design.n))


def test_objective_equals_the_formula_run_by_run(design, points):
    theta, weights = points
    found = evaluate(design, theta, weights, 1e-3, np.ones(5, dtype=bool)).f
    wanted = [naive_objective(t, design, w, 1e-3) for t, w in zip(theta, weights, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)  # same sum, other order of rounding


@pytest.mark.parametrize("delta", [1e-3, 10.0])  # nearly all runs outside δ; all inside
def test_gradient_and_hessian_equal_central_differences(design, points, delta):
    theta, weights = points
    exact = np.ones(5, dtype=bool)
    here = evaluate(design, theta, weights, delta, exact)
    step = 1e-6
    for k in range(6):
        shift = np.zeros(6)
        shift[k] = step
        up, down = (evaluate(design, theta + s * shift, weights, delta, exact) for s in (1, -1))
        gradient = (up.f - down.f) / (2 * step)
        hessian = (up.gradient - down.gradient) / (2 * step)
        # second-order differences: error about step² · f''' plus rounding 1e-16 / step
        np.testing.assert_allclose(here.gradient[:, k], gradient, rtol=1e-6, atol=1e-8)
        scale = np.abs(here.hessian).max()
        np.testing.assert_allclose(here.hessian[:, k], hessian, rtol=1e-5, atol=1e-8 * scale)


def test_the_majoriser_is_positive_semidefinite_and_keeps_the_gradient(design, points):
    theta, weights = points
    major = evaluate(design, theta, weights, 1e-3, np.zeros(5, dtype=bool))
    exact = evaluate(design, theta, weights, 1e-3, np.ones(5, dtype=bool))
    np.testing.assert_array_equal(major.gradient, exact.gradient)
    smallest = np.linalg.eigvalsh(major.hessian).min(axis=1)
    assert np.all(smallest > -1e-12 * np.abs(major.hessian).max(axis=(1, 2)))


@pytest.mark.parametrize("phi", [None, 0.0, 1.0])
def test_scipy_finds_no_lower_objective(design, phi):
    """L-BFGS-B as a referee, scaled by 1e4 with tight tolerances: its defaults stop early here."""
    ours = solve(design, phi=phi, n_starts=100)
    generator = np.random.default_rng(11)
    best = np.inf
    w, exact = np.ones((1, design.n)), np.zeros(1, dtype=bool)
    free = slice(0, 6 if phi is None else 5)

    def scaled(x, start):
        theta = start.copy()
        theta[free] = x
        state = evaluate(design, theta[None], w, 1e-3, exact)
        return 1e4 * state.f[0], 1e4 * state.gradient[0, free]

    for _ in range(8):
        start = from_law(design, ours.law) + generator.normal(size=6) * np.array(
            [0.1, 0.1, 0.05, 0.02, 0.02, 0.1]
        )
        if phi is not None:
            start[5] = phi
        options = {"ftol": 0.0, "gtol": 1e-10, "maxiter": 10_000, "maxfun": 20_000, "maxls": 60}
        result = minimize(
            scaled, start[free], args=(start,), jac=True, method="L-BFGS-B", options=options
        )
        best = min(best, result.fun / 1e4)
    assert ours.objective <= best * (1 + 1e-9)
    assert best == pytest.approx(ours.objective, rel=1e-6)  # the referee gets there too


def test_many_starts_reach_the_best(design):
    solution = solve(design, n_starts=100)
    assert solution.n_starts == 112  # 100 random and 12 from the grid
    assert solution.n_at_best >= 30
    assert solution.at_bound == ()


def test_duplicating_or_averaging_the_runs_leaves_the_optimum(design):
    """Sum, mean and doubled data share the minimiser; absolute tolerances would fail here."""
    base = from_law(design, solve(design, n_starts=30).law)
    mean = solve(design, weights=np.full(design.n, 1 / design.n), n_starts=30)
    arrays = {
        name: np.tile(getattr(design, name), 2)
        for name in ("once", "rec", "log_r", "log_d", "log_loss")
    }
    twice = solve(replace(design, **arrays), n_starts=30)
    np.testing.assert_allclose(from_law(design, mean.law), base, atol=1e-8)
    np.testing.assert_allclose(from_law(design, twice.law), base, atol=1e-8)


def test_centred_logs_and_natural_units_are_inverse(design, known_law):
    back = to_law(design, from_law(design, known_law))
    for name in ("E", "A", "alpha", "B", "beta", "phi"):
        assert getattr(back, name) == pytest.approx(getattr(known_law, name), rel=1e-13)


def test_resamples_reach_the_optimum_of_their_own_many_starts(design):
    generator = np.random.default_rng(5)
    weights = generator.multinomial(design.n, np.full(design.n, 1 / design.n), size=4).astype(float)
    start = solve(design, n_starts=20).law
    _, f = solve_resamples(design, weights, start=start)
    for w, found in zip(weights, f, strict=True):
        assert found <= solve(design, weights=w, n_starts=100).objective * (1 + 1e-9)


def test_a_law_without_floor_says_that_e_is_on_its_bound():
    """L = A·N^−α + B·D^−β exactly: E is numerically zero and reported so."""
    n = np.repeat(np.geomspace(1e6, 1e8, 5), 5)
    tokens = np.tile(np.geomspace(1e7, 1e9, 5), 5)
    r = np.tile([1.0, 4.0], 13)[:25]
    loss = 30 * (0.3 * n + r**0.5 * 0.7 * n) ** -0.2 + 500 * tokens**-0.35
    solution = solve(
        Design.of(n_once=0.3 * n, n_rec=0.7 * n, r=r, tokens=tokens, loss=loss), n_starts=50
    )
    assert solution.law.E < 1e-3
    assert solution.at_bound == ("E",)
    assert solution.law.phi == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("delta", [-1e-3, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(design, delta):
    with pytest.raises(ValueError, match=f"delta is {delta}.*1e-3.*least absolute"):
        solve(design, delta=delta)
