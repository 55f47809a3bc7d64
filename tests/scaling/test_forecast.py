"""The large-sample formula against refits and draws, the simulation against the formula and the paper."""

from dataclasses import replace

import numpy as np
import pytest

from scaling.fits.bootstrap import bootstrap
from scaling.fits.fit import fit_joint, predict
from scaling.planning.design import PAPER_GRID, PAPER_LAW, Grid, iso_depth, planned_runs
from scaling.planning.forecast import (
    Forecast,
    Sensitivity,
    approximate_delta_width,
    approximate_width,
    simulate,
)
from scaling.planning.noise import Noise
from scaling.runs.table import RunTable, design_of
from scaling.solver.solve import solve_resamples

RS = (1, 2, 4, 8)
GRID = Grid(
    budgets=(4.64e17, 1e18, 2.15e18, 4.64e18),
    widths=((384, 512, 768), (384, 640, 896), (512, 768, 1024), (640, 896, 1280)),
    recurrences=(1, 2, 4),
)
NOISE = Noise()


@pytest.fixture(scope="module")
def runs():
    return planned_runs(GRID, iso_depth(RS))


@pytest.fixture(scope="module")
def papers_runs():
    return planned_runs(PAPER_GRID, iso_depth(RS))


def refitted_phi(runs, loss, delta):
    design = design_of(runs.assign(loss=loss))
    theta, _ = solve_resamples(design, np.ones((1, len(runs))), start=PAPER_LAW, delta=delta)
    return float(theta[0, 5])


def test_pull_is_the_slope_of_phi_in_each_loss(runs):
    """Least squares (δ above every residual): φ̂ of refits by central differences."""
    wide, step = 1.0, 1e-5
    loss = predict(PAPER_LAW, runs)
    rows = np.arange(len(runs))
    pull = Sensitivity.of(runs, PAPER_LAW, NOISE, delta=wide).pull(rows)
    for k in (0, 7, 20, 35):
        ends = [
            refitted_phi(runs, loss * np.exp(sign * step * (rows == k)), wide) for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        # ρ = prediction − observation, in logs; second differences are of order step²
        assert slope == pytest.approx(pull[k], rel=1e-3, abs=1e-4 * np.abs(pull).max())


def test_variance_is_that_of_drawn_scores(runs):
    """Σ c·clip(own + shared, ±δ) over 20,000 draws: the sd of a variance is 1 % of it."""
    delta, noise = 1e-3, Noise(run=0.002, cell=0.003)
    rows = np.arange(len(runs))
    at = Sensitivity.of(runs, PAPER_LAW, noise, delta=delta)
    pull = at.pull(rows)
    loss = predict(PAPER_LAW, runs)
    generator = np.random.default_rng(0)
    shared = generator.normal(size=(20_000, at.cells.max() + 1))[:, at.cells] * noise.cell / loss
    own = generator.normal(size=(20_000, len(runs))) * noise.run / loss
    drawn = np.clip(own + shared, -delta, delta) @ pull
    assert at.variance(rows, pull) == pytest.approx(float(drawn.var()), rel=0.05)


def test_the_formulas_width_is_the_simulations(papers_runs):
    """400 sets: percentiles at 2.5 % of a normal have a standard error of 5 % of the width."""
    found = simulate(papers_runs, PAPER_LAW, NOISE, n_sets=400, n_bootstrapped=0)
    assert found.high - found.low == pytest.approx(found.approximate, rel=0.15)
    assert found.expected is None and found.width == found.high - found.low


def test_estimates_are_hardly_biased(papers_runs):
    """A tenth of the interval at most, with a standard error of 0.0018 over 200 sets."""
    found = simulate(papers_runs, PAPER_LAW, NOISE, n_sets=200, n_bootstrapped=0, seed=1)
    assert abs(found.bias) < 0.01
    assert found.low < PAPER_LAW.phi < found.high


def test_the_papers_own_interval_is_one_that_the_forecast_expects(papers_runs, paper):
    """Refitted, the 116 runs give an interval within the middle 80 % of the simulated ones."""
    found = simulate(papers_runs, PAPER_LAW, NOISE, n_sets=24)
    real = bootstrap(fit_joint(RunTable.of(paper, split="regression"), n_starts=40))
    low, high = found.expected_range
    assert low < real.high - real.low < high
    assert low < 0.53 - 0.41 < high  # as published


def test_most_intervals_hold_the_truth(runs):
    """Nominal 95 %; at a coverage of 80 % half of all seeds would fail."""
    found = simulate(runs, PAPER_LAW, NOISE, n_sets=30, n_bootstrapped=30, resamples=60)
    assert found.n_bootstrapped == 30
    assert found.n_covered >= 25


@pytest.mark.slow
def test_coverage_of_a_planned_grid_is_near_nominal(papers_runs):
    """150 sets: the standard error of a coverage of 95 % is 1.8 %."""
    found = simulate(papers_runs, PAPER_LAW, NOISE, n_sets=150, n_bootstrapped=150)
    assert 0.88 <= found.n_covered / found.n_bootstrapped <= 0.99


def test_a_difference_of_phi_is_recovered_with_its_sign(runs):
    found = simulate(runs, PAPER_LAW, NOISE, delta_phi=-0.3, n_sets=60, n_bootstrapped=0)
    assert (found.of, found.truth) == ("delta_phi", -0.3)
    assert found.low < -0.3 < found.high
    assert abs(found.bias) < 0.04  # standard error 0.008, and the fit is not linear
    assert found.p_sign == 1.0
    assert found.high - found.low == pytest.approx(found.approximate, rel=0.35)  # 60 sets: 12 %


def test_equal_laws_and_unlooped_runs_alone_leave_no_difference(runs):
    """Where every run is trained once and enters both fits, Δφ of equal laws is exactly 0."""
    at = Sensitivity.of(runs, PAPER_LAW, NOISE)
    rows = np.arange(len(runs))
    once = np.ones(len(runs), dtype=bool)
    assert approximate_delta_width(at, at, rows, once) == 0.0
    apart = approximate_delta_width(at, at, rows, ~once)
    assert apart == pytest.approx(np.sqrt(2) * approximate_width(at, rows), rel=1e-12)


def test_twice_the_runs_narrow_the_interval_by_the_root_of_two(runs):
    """Without shared noise; with it the cells' number counts as well."""
    alone = Noise(run=0.01, cell=0.0)
    rows = np.arange(len(runs))
    at = Sensitivity.of(runs, PAPER_LAW, alone)
    doubled = approximate_width(at, np.concatenate([rows, rows]))
    assert doubled == pytest.approx(approximate_width(at, rows) / np.sqrt(2), rel=1e-9)


def test_undetermined_runs_have_no_width(runs):
    at = Sensitivity.of(runs, PAPER_LAW, NOISE)
    unlooped = np.flatnonzero(runs["r"] == 1)
    assert approximate_width(at, unlooped) == np.inf
    assert approximate_width(at, np.arange(4)) == np.inf
    assert np.isfinite(approximate_width(at, np.arange(len(runs))))


def test_a_law_without_a_floor_has_a_width(runs):
    """E = 0 lies on its bound; the formula holds it there."""
    at = Sensitivity.of(runs, replace(PAPER_LAW, E=0.0), NOISE)
    assert 0.0 < approximate_width(at, np.arange(len(runs))) < 1.0


def test_what_identifies_no_law_or_drowns_in_noise_is_refused(runs):
    with pytest.raises(ValueError, match="the planned grid: all runs have recurrences = 2"):
        simulate(runs[runs["r"] == 2], PAPER_LAW, NOISE)
    with pytest.raises(ValueError, match="more than 0.1 of the smallest loss"):
        simulate(runs, PAPER_LAW, Noise(run=1.0))
    with pytest.raises(ValueError, match="n_sets is 1"):
        simulate(runs, PAPER_LAW, NOISE, n_sets=1)


def test_a_seed_gives_the_same_forecast_and_json_keeps_it(runs):
    once, again, other = (
        simulate(runs, PAPER_LAW, NOISE, n_sets=4, n_bootstrapped=2, resamples=20, seed=seed)
        for seed in (5, 5, 6)
    )
    assert once == again != other
    assert Forecast.from_json(once.to_json()) == once
