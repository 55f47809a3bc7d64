"""Gaps to the unlooped model: the published ranges, and a brute-force frontier."""

import numpy as np
import pandas as pd
import pytest

from scaling.fits.subsets import per_architecture
from scaling.optima.gaps import GapRange, UnloopedGap, gap_ranges, gaps_to_unlooped
from scaling.runs.table import RunTable

PUBLISHED = {2: (0.03, 0.06), 4: (0.05, 0.08), 8: (0.09, 0.12)}
STARTS = 40


@pytest.fixture(scope="module")
def table(paper_path):
    return RunTable.read(paper_path, split="regression")


@pytest.fixture(scope="module")
def gaps(table, paper_analysis):
    return gaps_to_unlooped(table, paper_analysis.fit.law, per_architecture(table, n_starts=STARTS))


def test_parabola_minima_give_the_published_ranges(gaps):
    found = {one.r: one for one in gap_ranges(gaps) if one.source == "parabola"}
    for r, (low, high) in PUBLISHED.items():
        # half a unit of the published digit
        assert (found[r].low, found[r].high) == pytest.approx((low, high), abs=5e-3)
        assert (found[r].n_budgets, found[r].n_missing) == (6, 0)


def test_gaps_grow_with_r_and_flatten_at_the_largest_budgets(gaps):
    """Published: monotonic in r at every budget, and within 0.006 nats from 1e19 to 2.15e19."""
    frame = pd.DataFrame([vars(one) for one in gaps if one.source == "parabola"])
    wide = frame.pivot(index="budget_flops", columns="r", values="gap")
    assert (wide.diff(axis=1).iloc[:, 1:] > 0).all(axis=None)
    assert (wide.loc[2.15e19] - wide.loc[1e19]).abs().max() < 0.006


def test_both_laws_agree_with_the_minima_to_the_size_of_their_errors(gaps):
    frame = pd.DataFrame([vars(one) for one in gaps])
    wide = frame.pivot(index=["budget_flops", "r"], columns="source", values="gap")
    # the joint law misses single cells by up to its largest residual, 0.036; RMSE 0.011
    assert (wide["joint"] - wide["parabola"]).abs().max() < 0.02
    assert (wide["own"] - wide["parabola"]).abs().max() < 0.01  # RMSE of the own fits


def test_the_laws_gap_is_the_difference_of_two_brute_force_minima(make_grid, known_law):
    gaps = gaps_to_unlooped(RunTable.of(make_grid(known_law)), known_law)
    d = np.geomspace(8, 2000, 200_001)
    for one in (gap for gap in gaps if gap.source == "joint"):
        lowest = {}
        for r in (1, one.r):
            n_once, n_rec = 48 * d**2, 192 * d**2 / r
            tokens = one.budget_flops / (6 * 240 * d**2)
            lowest[r] = known_law.loss(n_once, n_rec, r, tokens).min()
        # the grid's steps are 3e-5 wide: a minimum is missed by their square
        assert one.gap == pytest.approx(lowest[one.r] - lowest[1], abs=1e-8)


def test_without_r_one_or_its_minimum_the_reason_is_given(make_grid, known_law):
    table = RunTable.of(make_grid(known_law, rs=(2, 4)))
    gaps = gaps_to_unlooped(table, known_law)
    assert len(gaps) == 12 and all(one.gap is None for one in gaps)
    joint = [one for one in gaps if one.source == "joint"]
    assert all(one.reason == "r = 1: the table has no unlooped model of this effective depth"
               for one in joint)  # fmt: skip
    (first, *_) = gap_ranges(gaps)
    assert (first.low, first.high, first.n_budgets, first.n_missing) == (None, None, 0, 3)


def test_two_widths_have_no_parabola_but_a_laws_gap(make_grid, known_law):
    gaps = gaps_to_unlooped(RunTable.of(make_grid(known_law, widths=(64, 96))), known_law)
    for one in gaps:
        if one.source == "parabola":
            assert one.gap is None and "2 sizes, a parabola needs 3" in one.reason
        else:
            assert one.gap > 0 and one.reason is None


def test_an_own_fit_that_was_refused_leaves_its_reason(make_grid, known_law):
    table = RunTable.of(make_grid(known_law, widths=(64, 96)))
    own = per_architecture(table, n_starts=STARTS)
    gaps = [one for one in gaps_to_unlooped(table, own=own) if one.source == "own"]
    assert len(gaps) == 6
    assert all("parameter counts" in one.reason and one.gap is None for one in gaps)


def test_a_budget_without_runs_of_an_r_is_said(table, paper_analysis):
    lacking = table.where((table.runs["r"] != 4) | (table.runs["budget_flops"] > 1e18))
    found = {
        one.budget_flops: one
        for one in gaps_to_unlooped(lacking)
        if one.r == 4 and one.source == "parabola"
    }
    assert found[1e18].reason == "r = 4: no runs at this budget"
    assert found[2.15e18].gap is not None


def test_each_depth_is_compared_with_the_unlooped_model_of_its_depth(make_grid, known_law):
    shallow, deep = make_grid(known_law), make_grid(known_law)
    deep["run_id"] = "deep-" + deep["run_id"]
    deep["n_once"] += 48 * deep["hidden_size"] ** 2
    deep["train_flops_per_token"] += 6 * 48 * deep["hidden_size"] ** 2
    deep["tokens"] = deep["budget_flops"] / deep["train_flops_per_token"]
    pooled = pd.concat([shallow.assign(effective_depth=20), deep.assign(effective_depth=24)])
    gaps = gaps_to_unlooped(RunTable.of(pooled), known_law)
    alone = gaps_to_unlooped(RunTable.of(shallow.assign(effective_depth=20)), known_law)
    assert [one for one in gaps if one.effective_depth == 20] == list(alone)
    assert sum(one.effective_depth == 24 for one in gaps) == len(alone)


def test_without_budgets_there_are_no_gaps(make_grid, known_law):
    assert gaps_to_unlooped(RunTable.of(make_grid(known_law).drop(columns="budget_flops"))) == ()


def test_results_come_back_from_their_json(gaps):
    assert UnloopedGap.from_json(gaps[0].to_json()) == gaps[0]
    (one, *_) = gap_ranges(gaps)
    assert GapRange.from_json(one.to_json()) == one
