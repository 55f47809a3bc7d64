"""Predicted losses of planned runs, and held-out runs against a law fitted without them."""

import numpy as np
import pandas as pd
import pytest

from scaling.fits.fit import fit_joint
from scaling.optima.frontier import architectures, optimum
from scaling.optima.predict import HeldOut, Prediction, held_out, predict_run, predict_width
from scaling.runs.table import RunTable

STARTS = 40


@pytest.fixture(scope="module")
def table(paper_path):
    return RunTable.read(paper_path, split="regression")


@pytest.fixture
def law(paper_analysis):
    return paper_analysis.fit.law


@pytest.fixture
def looped(table):
    return next(one for one in architectures(table.runs)[0] if one.r == 4)


def test_counts_give_the_fits_own_prediction_of_its_runs(paper_analysis, law):
    for row in paper_analysis.fit.runs.iloc[::20].itertuples():
        one = predict_run(law, n_once=row.n_once, n_rec=row.n_rec, r=row.r, tokens=row.tokens)
        assert one.loss == pytest.approx(row.predicted, rel=1e-14)
        assert one.n_eff == pytest.approx(row.n_once + row.r**law.phi * row.n_rec, rel=1e-14)


def test_width_and_budget_give_the_same_as_the_tables_counts(paper_analysis, law, looped):
    runs = paper_analysis.fit.runs
    for row in runs[runs["r"] == 4].iloc[::7].itertuples():
        by_tokens = predict_width(law, looped, row.hidden_size, tokens=row.tokens)
        # polynomials read off the columns: rounding only
        assert by_tokens.loss == pytest.approx(row.predicted, rel=1e-10)
        assert by_tokens.budget_flops == pytest.approx(
            row.tokens * row.train_flops_per_token, rel=1e-10
        )
        by_budget = predict_width(law, looped, row.hidden_size, budget_flops=row.budget_flops)
        # a run's tokens are whole steps: within 1 % of C / F, and 1 % of D is 0.003 nats
        assert by_budget.loss == pytest.approx(row.predicted, abs=3e-3)
        assert not by_budget.extrapolated


def test_no_width_beats_the_frontier_at_its_budget(law, looped):
    best = optimum(law, looped, 3e18)
    here = predict_width(law, looped, best.hidden_size, budget_flops=3e18)
    assert here.loss == pytest.approx(best.loss, rel=1e-12)
    for factor in (0.8, 0.99, 1.01, 1.25):
        other = predict_width(law, looped, factor * best.hidden_size, budget_flops=3e18)
        assert other.loss > best.loss


def test_a_width_outside_the_table_is_said(law, looped):
    assert predict_width(law, looped, 8192, budget_flops=1e22).extrapolated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "budget_flops is None and tokens is None, but exactly one"),
        ({"budget_flops": 1e18, "tokens": 1e9}, "but exactly one of them"),
        ({"tokens": 0.0}, "tokens is 0.0, but must be positive"),
        ({"budget_flops": float("inf")}, "budget_flops is inf, but must be positive and finite"),
    ],
)
def test_runs_without_a_length_are_refused(law, looped, arguments, message):
    with pytest.raises(ValueError, match=message):
        predict_width(law, looped, 640, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_rec": -1.0}, "n_rec is -1.0, but must be at least 0"),
        ({"r": 0}, "r is 0, but must be at least 1"),
        ({"tokens": float("nan")}, "tokens is nan, but must be positive"),
        ({"n_once": 0.0, "n_rec": 0.0}, "n_once and n_rec are both 0"),
    ],
)
def test_impossible_counts_are_refused(law, change, message):
    with pytest.raises(ValueError, match=message):
        predict_run(law, **{"n_once": 1e7, "n_rec": 1e7, "r": 4, "tokens": 1e9, **change})


def test_held_out_runs_are_predicted_by_a_fit_that_has_not_seen_them(table):
    out = table.runs["budget_flops"] > 5e18
    found = held_out(table, out, n_starts=STARTS)
    by_hand = fit_joint(table.where(~out), n_starts=STARTS)
    assert found.fit.law == by_hand.law and found.fit.law.phi == pytest.approx(0.453, abs=1e-3)
    assert (found.n_fitted, found.n_held_out) == (80, 36)
    runs = found.runs
    for row in runs.iloc[::9].itertuples():
        predicted = by_hand.law.loss(row.n_once, row.n_rec, float(row.r), row.tokens)
        assert row.residual == pytest.approx(row.loss - predicted, abs=1e-14)
    residual = runs["residual"].to_numpy()
    assert found.mean == pytest.approx(residual.mean())
    assert found.rmse == pytest.approx(np.sqrt((residual**2).mean()))
    assert found.max_abs == np.abs(residual).max()
    assert [(one.r, one.n_runs) for one in found.residuals] == [(r, 9) for r in (1, 2, 4, 8)]


def test_held_out_budgets_of_a_noiseless_law_leave_no_residual(make_grid, known_law):
    table = RunTable.of(make_grid(known_law))
    found = held_out(table, table.runs["budget_flops"] == 1.6e15, n_starts=STARTS)
    # parameters are recovered to 1e-6 (test_fit), and the largest budget is four times the others'
    assert found.max_abs < 1e-7


def test_the_paper_s_long_runs_lie_below_the_law_and_the_gap_near_its_prediction(table, paper):
    """s = 34 on 47 B tokens, 20 times the largest budget: 2.047 (r = 1) and 2.108 nats (r = 4)."""
    wide = paper[(paper["hidden_size"] == 34 * 64) & paper["recurrences"].isin((1, 4))].copy()
    assert len(wide) == 2
    wide["run_id"] = ["long-r1", "long-r4"]
    wide["tokens"] = 47e9
    wide["budget_flops"] = 47e9 * wide["train_flops_per_token"]
    wide["val_loss"] = [2.047, 2.108]
    both = RunTable.of(pd.concat([paper, wide]), split="regression")
    found = held_out(both, both.runs["run_id"].str.startswith("long"), n_starts=STARTS)
    assert found.n_fitted == 116
    assert found.fit.law.phi == pytest.approx(0.4585, abs=5e-4)  # the same 116 runs, same split
    residual = found.runs.set_index("run_id")["residual"]
    # found with this law; no published value. The long runs do better by more than any fitted run
    assert residual["long-r1"] == pytest.approx(-0.067, abs=2e-3)
    assert residual["long-r4"] == pytest.approx(-0.056, abs=2e-3)
    predicted = found.runs.set_index("run_id")["predicted"]
    gap = predicted["long-r4"] - predicted["long-r1"]
    assert gap == pytest.approx(0.061, abs=0.015)  # observed; within two RMSE of the law


def test_held_out_parts_that_leave_too_little_say_why(table):
    none = held_out(table, table.runs["r"] > 0)
    assert none.fit is None and none.reason == "every run is held out" and none.residuals == ()
    single = held_out(table, table.runs["r"] > 1, n_starts=STARTS)
    assert single.fit is None and single.rmse is None
    assert "all runs have recurrences = 1" in single.reason and single.n_held_out == 87


@pytest.mark.parametrize("out", [[], [True], np.zeros(116, dtype=bool)])
def test_a_mask_that_marks_nothing_or_not_the_table_is_refused(table, out):
    with pytest.raises(ValueError, match="must mark at least one of the table's 116 runs"):
        held_out(table, out)


def test_results_come_back_from_their_json(table, law, looped):
    one = predict_width(law, looped, 640, budget_flops=1e18)
    assert Prediction.from_json(one.to_json()) == one
    found = held_out(table, table.runs["r"] == 8, n_starts=STARTS)
    again = HeldOut.from_json(found.to_json())
    assert again.fit.law == found.fit.law and again.residuals == found.residuals
