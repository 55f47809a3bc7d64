"""Published numbers and recovery of known laws."""

import numpy as np
import pytest

import scaling
from scaling import RunTable

# Tolerances of the published numbers: losses read off a figure (1e-4 nats) move φ by about 2e-4.
FREE = {"phi": 0.4585, "alpha": 0.1993, "beta": 0.3689, "E": 1.568, "A": 28.04, "B": 920.0}


def test_regression_split_reproduces_the_published_fit(paper_analysis):
    law = paper_analysis.fit.law
    assert law.phi == pytest.approx(FREE["phi"], abs=5e-4)
    for name in ("alpha", "beta", "E"):
        assert getattr(law, name) == pytest.approx(FREE[name], abs=5e-4)
    assert law.A == pytest.approx(
        FREE["A"], rel=2e-3
    )  # amplitudes are loose: corr(log A, α) = 1.00
    assert law.B == pytest.approx(FREE["B"], rel=5e-3)
    assert paper_analysis.fit.r2 == pytest.approx(0.9972, abs=1e-4)
    assert paper_analysis.fit.n_runs == 116


@pytest.mark.parametrize(
    ("split", "phi", "tolerance"), [("once", 0.4575, 7e-4), ("text", 0.433, 1e-3)]
)
def test_other_splits_give_their_known_phi(paper, split, phi, tolerance):
    assert scaling.fit_joint(
        RunTable.of(paper, split=split), n_starts=100
    ).law.phi == pytest.approx(phi, abs=tolerance)


@pytest.mark.parametrize(
    ("phi", "alpha", "beta", "e", "r2"),
    [(0, 0.227, 0.390, 1.71, 0.9858), (1, 0.218, 0.410, 1.66, 0.9552)],
)
def test_restricted_fits_reproduce_the_published_ones(paper_analysis, phi, alpha, beta, e, r2):
    fit = paper_analysis.restricted[phi]
    assert fit.law.phi == phi
    assert fit.law.alpha == pytest.approx(alpha, abs=1e-3)  # published to three digits
    assert fit.law.beta == pytest.approx(beta, abs=1e-3)
    assert fit.law.E == pytest.approx(e, abs=6e-3)
    assert fit.r2 == pytest.approx(r2, abs=2e-4)


def test_four_lower_budgets_with_the_split_of_the_whole_table(paper):
    table = RunTable.of(paper, split="regression")
    fit = scaling.fit_joint(table.where(table.runs["budget_flops"] < 5e18), n_starts=100)
    assert fit.law.phi == pytest.approx(0.453, abs=1e-3)
    assert fit.r2 == pytest.approx(0.9959, abs=1e-4)
    assert fit.law.alpha == pytest.approx(0.266, abs=1e-3)


def test_residuals_by_r_match_the_published_table(paper_analysis):
    published = {
        1: (-0.001, 0.018, 0.009),
        2: (0.004, 0.036, 0.011),
        4: (-0.006, 0.023, 0.011),
        8: (0.001, 0.029, 0.010),
    }
    assert {row.r for row in paper_analysis.fit.residuals} == set(published)
    for row in paper_analysis.fit.residuals:
        found = (row.mean, row.max_abs, row.rmse)
        assert found == pytest.approx(published[row.r], abs=6e-4)  # published to three digits
        assert row.n_runs == 29


def test_a_known_law_is_recovered_from_noiseless_losses(make_grid, known_law):
    fit = scaling.fit_joint(make_grid(known_law), n_starts=100)
    for name in ("E", "A", "alpha", "B", "beta", "phi"):
        # residuals end near 1e-12 in log loss; the Hessian's condition (1e5) magnifies them
        assert getattr(fit.law, name) == pytest.approx(getattr(known_law, name), rel=1e-6)
    assert fit.r2 == pytest.approx(1.0, abs=1e-12)


def test_n_rec_counts_only_through_phi_at_r_one(make_grid, known_law):
    """At r = 1 the division into n_once and n_rec does not matter: 1^φ = 1."""
    grid = make_grid(known_law, noise=0.01)
    moved = grid.copy()
    unlooped = moved["recurrences"] == 1
    moved.loc[unlooped, "n_rec"] += moved.loc[unlooped, "n_once"]
    moved.loc[unlooped, "n_once"] = 0
    assert scaling.fit_joint(moved, n_starts=50).law.phi == pytest.approx(
        scaling.fit_joint(grid, n_starts=50).law.phi, abs=1e-7
    )


def test_once_split_moves_the_injection_and_keeps_the_sum(paper):
    n_once, n_rec = scaling.split_parameters(paper, "once")
    np.testing.assert_array_equal(n_once - paper["n_once"], paper["n_injection"])
    np.testing.assert_array_equal(n_once + n_rec, paper["n_once"] + paper["n_rec"])


def test_regression_split_is_the_straight_line_through_each_width(paper):
    n_once, n_rec = scaling.split_parameters(paper, "regression")
    # FACTS of the published fit: N_once = 50.61·d², block 11.852·d² (rounded to the digits given)
    np.testing.assert_allclose(n_once / paper["hidden_size"] ** 2, 50.61, atol=5e-3)
    block = n_rec / (16 / paper["recurrences"]) / paper["hidden_size"] ** 2
    np.testing.assert_allclose(block, 11.852, atol=5e-4)


def test_runs_that_are_not_finished_are_left_out_and_counted(make_grid, known_law):
    grid = make_grid(known_law, noise=0.005)
    grid["status"] = "finished"
    grid.loc[[0, 5, 9], "status"] = ["diverged", "running", "diverged"]
    grid.loc[[0, 5], "val_loss"] = np.nan
    fit = scaling.fit_joint(grid, n_starts=20)
    assert fit.n_left_out == {"diverged": 2, "running": 1}
    assert fit.n_runs == len(grid) - 3


def test_a_single_r_is_refused_and_named(make_grid, known_law):
    with pytest.raises(ValueError, match=r"all runs have recurrences = 2.*two different r"):
        scaling.fit_joint(make_grid(known_law, rs=(2,)))


def test_a_width_with_a_single_r_is_refused_by_the_regression_split(paper):
    frame = paper[~((paper["hidden_size"] == 384) & (paper["recurrences"] > 1))]
    with pytest.raises(ValueError, match=r"width 384 .*single shared_depth / r.*--split text"):
        RunTable.of(frame, split="regression")


def test_fewer_runs_than_parameters_are_refused(make_grid, known_law):
    with pytest.raises(ValueError, match=r"4 different runs.*6 free parameters"):
        scaling.fit_joint(make_grid(known_law, budgets=(1e14,), widths=(64, 96), rs=(1, 4)))


@pytest.mark.parametrize("column", ["given", "absent", "missing for one run"])
@pytest.mark.parametrize("fit", [scaling.fit_joint, scaling.fit_chinchilla])
def test_one_compute_budget_is_refused(make_grid, known_law, column, fit):
    """Without the column the budget is 6·(N_once + r·N_rec)·D; tokens rounded to steps stay one budget."""
    widths = (48, 56, 64, 80, 96, 128)
    grid = make_grid(known_law, budgets=(4e14,), widths=widths, rs=(1, 2, 4))
    grid["tokens"] = (grid["tokens"] / 4096).round() * 4096
    if column == "absent":
        grid = grid.drop(columns="budget_flops")
    if column == "missing for one run":
        grid.loc[3, "budget_flops"] = np.nan
    if fit is scaling.fit_chinchilla and column != "given":
        grid = grid[grid["recurrences"] == 1]
    with pytest.raises(ValueError, match=r"one compute budget, 4e\+14 FLOPs.*β.*second budget"):
        fit(grid)


def test_one_ratio_of_tokens_to_parameters_is_refused(make_grid, known_law):
    grid = make_grid(known_law)
    grid["tokens"] = 20 * (grid["n_once"] + grid["n_rec"])
    with pytest.raises(ValueError, match="same tokens per parameter"):
        scaling.fit_joint(grid)


def test_two_token_counts_are_refused(make_grid, known_law):
    grid = make_grid(known_law)
    grid["tokens"] = np.where(grid["hidden_size"] == 64, 1e6, 2e6)
    grid["val_loss"] += np.arange(len(grid)) * 1e-4
    with pytest.raises(ValueError, match=r"only 2 different token counts.*E, B and β"):
        scaling.fit_joint(grid)


def test_an_unknown_split_is_refused(paper):
    with pytest.raises(ValueError, match=r"split is 'half'.*text, once, regression"):
        RunTable.of(paper, split="half")
