"""The block bootstrap: published interval, determinism, block structure."""

import numpy as np
import pytest

import scaling
from scaling.fits.cells import cells_of, draw_cells


def test_interval_of_the_paper_runs(paper_analysis):
    """200 resamples of these runs give [0.414, 0.508]; other seeds move the ends by about 0.01."""
    low, high = paper_analysis.phi_ci
    assert low == pytest.approx(0.414, abs=0.01)
    assert high == pytest.approx(0.508, abs=0.015)
    assert paper_analysis.interval.n_cells == 24
    assert paper_analysis.interval.n_resamples == 200
    assert paper_analysis.interval.n_redrawn == 0


def test_same_seed_same_draws_other_seed_other_draws(paper_analysis):
    fit = paper_analysis.fit
    first, again, other = (scaling.bootstrap(fit, resamples=20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.draws, again.draws)
    assert not np.array_equal(first.draws, other.draws)


def test_runs_of_one_cell_always_count_equally(make_grid, known_law):
    """Seeds of one setting and all widths of a (budget, r) pair are drawn together."""
    fit = scaling.fit_joint(make_grid(known_law, seeds=2, noise=0.01), n_starts=20)
    cells = cells_of(fit.runs)
    assert len(cells) == 9
    weights = cells.weights(draw_cells(cells, 30, seed=0)[0])
    assert weights.shape == (30, 54)
    for _, cell in fit.runs.groupby(["budget_flops", "r"]):
        assert np.all(weights[:, cell.index] == weights[:, cell.index[:1]])
    np.testing.assert_array_equal(
        weights.sum(axis=1), 9 * 6
    )  # cells drawn with replacement, six runs each


def test_resamples_that_lose_an_r_or_a_budget_are_drawn_again_and_counted(make_grid, known_law):
    fit = scaling.fit_joint(
        make_grid(known_law, budgets=(1e14, 1e15), rs=(1, 4), noise=0.005), n_starts=20
    )
    cells = cells_of(fit.runs)
    counts, redrawn = draw_cells(cells, 100, seed=0)
    assert redrawn > 0
    for row in cells.weights(counts):
        present = fit.runs[row > 0]
        assert present["r"].nunique() == 2 and present["budget_flops"].nunique() == 2


def test_without_budgets_the_interval_is_unavailable_and_says_why(make_grid, known_law):
    analysis = scaling.analyse(make_grid(known_law, noise=0.005).drop(columns="budget_flops"))
    assert analysis.phi_ci is None
    assert "budget_flops is missing" in analysis.interval.reason
    assert any("no interval" in text for text in analysis.warnings)


def test_a_fit_with_phi_held_has_no_interval(paper_analysis):
    with pytest.raises(ValueError, match="phi was held at 0"):
        scaling.bootstrap(paper_analysis.restricted[0])
