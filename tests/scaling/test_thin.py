"""Large tables are searched on a few of their runs, and solved on all of them."""

import numpy as np
import pytest

from scaling.runs.table import RunTable
from scaling.solver import thin
from scaling.solver.objective import evaluate
from scaling.solver.solve import from_law, solve, solve_resamples
from scaling.solver.thin import search_runs


@pytest.fixture(scope="module")
def design(make_grid, known_law):
    return RunTable.of(make_grid(known_law, seeds=12, noise=0.01)).design


def test_a_small_table_is_searched_whole(design):
    weights = np.ones((1, design.n))
    search = search_runs(design, weights)
    assert search.whole and search.design is design and search.weights is weights


def test_every_r_is_there_and_weighs_what_it_weighed(design):
    """Also an r of two runs, which an even draw over the table would lose."""
    keep = np.concatenate([np.flatnonzero(design.log_r < 1), np.flatnonzero(design.log_r > 1)[:2]])
    part = design.part(keep)
    weights = np.ones((3, part.n))
    search = search_runs(part, weights, most=30)
    assert not search.whole and search.design.n == 22  # 10 of r = 1, 10 of r = 2, both of r = 4
    for log_r in np.unique(part.log_r):
        np.testing.assert_allclose(
            search.weights[:, search.design.log_r == log_r].sum(axis=1),
            weights[:, part.log_r == log_r].sum(axis=1),
        )
    widths = search.design.once[search.design.log_r == 0]
    assert set(widths) == set(part.once[part.log_r == 0])


@pytest.mark.parametrize("delta", [1e-3, 0.0])
def test_the_optimum_is_that_of_all_runs(design, monkeypatch, delta):
    """The search's 30 runs choose the basin only: 1e-9 is the bar for any start."""
    whole = solve(design, n_starts=40, delta=delta)
    monkeypatch.setattr(thin, "MOST", 30)
    few = solve(design, n_starts=40, delta=delta)
    assert few.objective == pytest.approx(whole.objective, rel=1e-9)
    assert few.law.phi == pytest.approx(whole.law.phi, abs=1e-6)
    assert few.n_starts == whole.n_starts and 0 < few.n_at_best <= few.n_starts


def test_resamples_end_at_optima_of_all_runs(design, monkeypatch):
    weights = np.random.default_rng(0).integers(0, 3, (5, design.n)).astype(float)
    start = solve(design, n_starts=40).law
    _, whole = solve_resamples(design, weights, start=start)
    monkeypatch.setattr(thin, "MOST", 30)
    monkeypatch.setattr("scaling.solver.solve._AT_ONCE", 2 * design.n)  # 2, 2 and 1 at once
    _, few = solve_resamples(design, weights, start=start)
    np.testing.assert_allclose(few, whole, rtol=1e-9)


def test_blocks_of_runs_add_up(design, known_law, monkeypatch):
    """Sums over 324 runs in another order: rounding only."""
    theta = from_law(design, known_law) + np.array([[0.0], [0.05]])
    weights = np.random.default_rng(1).uniform(size=(2, design.n))
    exact = np.array([True, False])
    whole = evaluate(design, theta, weights, 1e-3, exact)
    monkeypatch.setattr("scaling.solver.objective._CHUNK", 50)
    blocks = evaluate(design, theta, weights, 1e-3, exact)
    for name in ("f", "gradient", "hessian", "majoriser"):
        scale = np.abs(getattr(whole, name)).max()
        np.testing.assert_allclose(
            getattr(blocks, name), getattr(whole, name), rtol=1e-12, atol=1e-12 * scale
        )
