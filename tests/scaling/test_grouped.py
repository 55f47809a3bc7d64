"""The solver for laws with an E per group, against finite differences, scipy and the joint solver."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from scaling import RunTable
from scaling.fits.per_architecture import GRID, floors_problem, solve_floors
from scaling.solver.grouped import Problem, jacobian, log_prediction, solve_grouped, state_at
from scaling.solver.solve import solve


@pytest.fixture(scope="module")
def problem(_paper):
    return floors_problem(RunTable.of(_paper, split="regression"))


@pytest.fixture(scope="module")
def somewhere(problem):
    """Parameters off the optimum, where the residuals lie on both sides of δ = 0.05."""
    level = float(problem.design.log_loss.mean()) - 0.7
    return np.array([level - 0.6, level - 0.5, 0.25, 0.3, 0.4, *(level + 0.1 * np.arange(4))])


def _objective(problem, x):
    """Huber objective written from its definition."""
    design = problem.design
    n_eff = design.once + np.exp(x[4] * design.log_r) * design.rec
    total = np.exp(x[0]) * n_eff ** -x[2] + np.exp(x[1] - x[3] * design.log_d)
    residual = np.log(total + np.exp(x[5:])[problem.groups]) - design.log_loss
    size = np.abs(residual)
    return float(
        np.where(
            size <= problem.delta,
            residual**2 / 2,
            problem.delta * (size - problem.delta / 2),
        ).sum()
    )


def test_gradient_and_hessian_agree_with_finite_differences(problem, somewhere):
    wide = replace(problem, delta=0.05)
    state = state_at(wide, somewhere, exact=True)
    assert state.f == pytest.approx(_objective(wide, somewhere), rel=1e-13)
    gradient, hessian = np.empty(9), np.empty((9, 9))
    for k in range(9):
        step = np.zeros(9)
        step[k] = 1e-6
        gradient[k] = (
            _objective(wide, somewhere + step) - _objective(wide, somewhere - step)
        ) / 2e-6
        ahead, behind = (state_at(wide, somewhere + s, exact=True) for s in (step, -step))
        hessian[k] = (ahead.gradient - behind.gradient) / 2e-6
    # central differences of step h: h² of the third derivative, and rounding 1e-16·f/h
    np.testing.assert_allclose(state.gradient, gradient, atol=1e-8 * np.abs(gradient).max())
    np.testing.assert_allclose(state.hessian, hessian, atol=1e-7 * np.abs(hessian).max())


def test_jacobian_agrees_with_finite_differences(problem, somewhere):
    found = approx_fprime(somewhere, lambda x: log_prediction(problem, x), 1e-7)
    np.testing.assert_allclose(jacobian(problem, somewhere), found, atol=1e-6)  # one-sided: h


def test_one_group_is_the_joint_law(problem):
    single = replace(problem, groups=np.zeros_like(problem.groups))
    found = solve_grouped(single, exponents=GRID)
    joint = solve(problem.design, n_starts=100)
    assert found.objective == pytest.approx(joint.objective, rel=1e-9)
    assert found.phi == pytest.approx(joint.law.phi, abs=1e-6)
    assert found.E[0] == pytest.approx(joint.law.E, rel=1e-5)


def test_no_start_of_scipy_ends_below_the_optimum(problem):
    """Scipy's L-BFGS-B under our gradient, from 40 random starts, is the referee."""
    found = solve_floors(problem)
    lower, upper = problem.box()
    generator = np.random.default_rng(0)
    best = np.inf
    for _ in range(40):
        start = found.x + generator.normal(size=9) * [0.5, 0.5, 0.08, 0.08, 0.2, 0.2, 0.2, 0.2, 0.2]

        def scaled(x):
            state = state_at(problem, x, exact=False)
            return (
                1e4 * state.f,
                1e4 * state.gradient,
            )  # unscaled, its default tolerances stop early

        end = minimize(
            scaled,
            np.clip(start, lower, upper),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(lower, upper, strict=True)),
            options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000, "maxfun": 5000},
        )
        best = min(best, end.fun / 1e4)
    assert found.objective <= best * (1 + 1e-9)
    assert best <= found.objective * (1 + 1e-4)  # and it comes close, so that it is a referee


def test_weights_of_zero_leave_runs_out(problem, _paper):
    keep = (_paper["budget_flops"] < 1e19).to_numpy()
    part = floors_problem(RunTable.of(_paper, split="regression").where(keep))
    weighted = solve_floors(replace(problem, weights=keep.astype(float)))
    assert weighted.objective == pytest.approx(solve_floors(part).objective, rel=1e-9)


def test_a_threshold_of_zero_is_refused(problem):
    with pytest.raises(ValueError, match="delta is 0"):
        replace(problem, delta=0.0)


def test_a_held_parameter_stays(problem):
    found = solve_floors(replace(problem, phi=(0.3, 0.3)))
    assert found.phi == 0.3


def test_noiseless_runs_of_a_law_without_n_give_its_parameters(problem):
    """Without the term in N: A is zero, and the exponential's parameters come back."""
    turns = np.tile(np.linspace(0.25, 3.0, 8), 2)
    groups = np.repeat(np.array([0, 1], dtype=np.int64), 8)
    loss = np.array([2.5, 2.9])[groups] + 1.4 * np.exp(-2.5 * turns)
    n = len(turns)
    design = replace(
        problem.design,
        once=np.ones(n),
        rec=np.zeros(n),
        log_r=np.zeros(n),
        log_d=turns - turns.mean(),
        log_loss=np.log(loss),
        mean_log_d=float(turns.mean()),
    )
    exponential = Problem(
        design=design,
        groups=groups,
        weights=np.ones(n),
        delta=1e-3,
        alpha=None,
        beta=(0.01, 50.0),
        phi=(0.0, 0.0),
    )
    found = solve_grouped(exponential, exponents=((1.0,), (0.3, 1.0, 3.0), (0.0,)))
    assert found.A == 0.0
    # residuals end near 1e-12; the Hessian's condition (1e4) magnifies them
    np.testing.assert_allclose([found.B, found.beta, *found.E], [1.4, 2.5, 2.5, 2.9], rtol=1e-7)
