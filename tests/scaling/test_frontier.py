"""Compute-optimal points against the closed form, and the exact polynomials in the width."""

import numpy as np
import pandas as pd
import pytest

import scaling
from scaling.optima.frontier import Architecture, FrontierPoint, architectures, frontier, optimum
from scaling.runs.table import RunTable
from scaling.solver.laws import Chinchilla


def test_frontier_equals_the_closed_form_when_all_counts_scale_as_d_squared(make_grid, known_law):
    """N_eff = k·N, F = f·N: A·α·(k·N)^−α = B·β·(C/(f·N))^−β at the minimum (Hoffmann, eq. 4)."""
    found, reasons = architectures(RunTable.of(make_grid(known_law)).runs)
    assert reasons == {} and [one.r for one in found] == [1, 2, 4]
    law = known_law
    for one in found:
        n = 48 + 192 / one.r
        k = (48 + one.r**law.phi * 192 / one.r) / n
        f = 6 * 240 / n
        for budget in (1e15, 1e19):
            power = (
                budget**law.beta
                * law.A
                * law.alpha
                * k**-law.alpha
                / (law.B * law.beta * f**law.beta)
            )
            best = power ** (1 / (law.alpha + law.beta))
            point = optimum(law, one, budget)
            # a minimum's position is known to the square root of the rounding of L: about 1e-7
            assert point.n == pytest.approx(best, rel=1e-6)
            assert point.loss == pytest.approx(
                law.E + law.A * (k * best) ** -law.alpha + law.B * (budget / f / best) ** -law.beta
            )
            assert point.tokens * f * point.n == pytest.approx(budget, rel=1e-12)


def test_the_paper_columns_are_exact_polynomials_in_the_width(paper):
    runs = RunTable.of(paper).runs
    found, reasons = architectures(runs)
    assert reasons == {}
    for one in found:
        group = runs[runs["r"] == one.r]
        flops, n_once, n_rec = one.at(group["hidden_size"].to_numpy())
        np.testing.assert_allclose(
            flops, group["train_flops_per_token"], rtol=1e-12
        )  # rounding only
        np.testing.assert_allclose(n_once, group["n_once"], rtol=1e-12, atol=1e-6)
        np.testing.assert_allclose(n_rec, group["n_rec"], rtol=1e-12)


def test_looped_models_trail_by_the_published_gaps(paper_analysis):
    """Published gaps to r = 1 over the six budgets, in nats, are from parabola minima."""
    budgets = np.array(paper_analysis.budgets())
    table = frontier(paper_analysis.fit.law, paper_analysis.architectures, budgets).pivot(
        index="budget_flops", columns="r", values="loss"
    )
    for r, low, high in ((2, 0.03, 0.06), (4, 0.05, 0.08), (8, 0.09, 0.12)):
        gap = table[r] - table[1]
        # the law misses single minima by up to its RMSE, 0.01 nats
        assert gap.between(low - 0.012, high + 0.012).all()


def test_missing_columns_and_mixed_architectures_are_named(make_grid, known_law):
    grid = make_grid(known_law)
    _, reasons = architectures(RunTable.of(grid.drop(columns="train_flops_per_token")).runs)
    assert reasons == dict.fromkeys((1, 2, 4), "column train_flops_per_token is missing")
    mixed = grid.copy()
    mixed.loc[mixed.index[::2], "n_once"] *= 2
    _, reasons = architectures(RunTable.of(mixed).runs)
    assert all("several architectures" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("budget", "edge"),
    [(1e-12, "smallest searched width, 1 "), (1e40, "largest searched width, 8192 ")],
)
def test_an_optimum_at_the_edge_of_the_searched_widths_is_none(make_grid, known_law, budget, edge):
    """Widths 64 to 128 are searched from 64/64 to 128·64: beyond, no number but a reason."""
    (one, *_), _ = architectures(RunTable.of(make_grid(known_law)).runs)
    point = optimum(known_law, one, budget)
    assert edge in point.reason and "the table's widths are 64 to 128" in point.reason
    assert (point.hidden_size, point.n, point.n_eff, point.tokens, point.loss) == (None,) * 5
    table = frontier(known_law, (one,), (budget, 1e15))
    assert np.isnan(table["loss"][0]) and table["loss"][1] > known_law.E
    assert table["loss"].dtype == float


def test_an_optimum_outside_the_tables_widths_is_marked(paper_analysis):
    table = frontier(paper_analysis.fit.law, paper_analysis.architectures, (1e19, 1e23)).set_index(
        "budget_flops"
    )
    assert not table.loc[1e19, "extrapolated"].any()
    assert table.loc[1e23, "extrapolated"].all()
    assert (table.loc[1e23, "hidden_size"] > 34 * 64).all()


def test_the_frontiers_n_is_the_models_own_whatever_the_split(paper, paper_analysis):
    """N of the text's definition: (48 + 192/r + 2)·d² looped, 240·d² unlooped."""
    table = frontier(paper_analysis.fit.law, paper_analysis.architectures, (1e19,))
    blocks = np.where(table["r"] == 1, 240, 50 + 192 / table["r"])
    np.testing.assert_allclose(table["n"], blocks * table["hidden_size"] ** 2, rtol=1e-9)


def test_chinchillas_law_is_minimised_like_a_joint_law_at_r_one(make_grid, known_law):
    (one, *_), _ = architectures(RunTable.of(make_grid(known_law)).runs)
    names = ("E", "A", "alpha", "B", "beta")
    plain = Chinchilla(**{name: getattr(known_law, name) for name in names})
    alone, joint = optimum(plain, one, 1e15), optimum(known_law, one, 1e15)
    assert alone.loss == pytest.approx(joint.loss, rel=1e-14)
    assert alone.n_eff == alone.n == pytest.approx(joint.n, rel=1e-6)  # position: root of rounding


def test_the_minimum_is_the_lowest_of_a_fine_grid_of_widths(paper_analysis):
    """Exact FLOPs with attention and unembedding, where no closed form exists."""
    law = paper_analysis.fit.law
    for one in paper_analysis.architectures:
        point = optimum(law, one, 4.64e18)
        d = np.geomspace(point.hidden_size / 3, point.hidden_size * 3, 20_001)
        flops, n_once, n_rec = one.at(d)
        losses = law.loss(n_once, n_rec, one.r, 4.64e18 / flops)
        assert point.loss <= losses.min() + 1e-14
        # steps of 1e-4 in log width
        assert point.hidden_size == pytest.approx(d[np.argmin(losses)], rel=2e-4)


def test_a_depth_that_grows_with_the_width_is_no_polynomial(make_grid, known_law):
    grid = make_grid(known_law, widths=(64, 96, 128, 192))
    grid["n_rec"] *= grid["hidden_size"] / 64
    found, reasons = architectures(RunTable.of(grid).runs)
    assert found == () and set(reasons) == {1, 2, 4}
    assert all("shape changes with the width" in reason for reason in reasons.values())


def test_polynomials_that_turn_negative_are_refused(make_grid, known_law):
    grid = make_grid(known_law)
    grid["train_flops_per_token"] = 6 * 240 * (grid["hidden_size"] ** 2 - 60 * grid["hidden_size"])
    _, reasons = architectures(RunTable.of(grid).runs)
    assert all("turn negative between widths 1 and 8192" in reason for reason in reasons.values())


def test_reasons_of_pooled_depths_name_the_depth(make_grid, known_law):
    grid = make_grid(known_law, rs=(1, 2))
    deep = grid.assign(
        run_id="deep-" + grid["run_id"], effective_depth=24, n_once=grid["n_once"] + 9
    )
    deep.loc[deep["recurrences"] == 2, "train_flops_per_token"] = np.nan
    found, reasons = architectures(
        RunTable.of(pd.concat([grid.assign(effective_depth=20), deep])).runs
    )
    assert [(one.r, one.effective_depth) for one in found] == [(1, 20.0), (1, 24.0), (2, 20.0)]
    assert reasons == {2: "r = 2, effective depth 24: column train_flops_per_token is missing"}


@pytest.mark.parametrize("budget", [0.0, -1e18, float("nan"), float("inf")])
def test_a_budget_that_is_no_budget_is_refused(paper_analysis, budget):
    with pytest.raises(ValueError, match="budget_flops is .*must be positive and finite"):
        optimum(paper_analysis.fit.law, paper_analysis.architectures[0], budget)


def test_points_come_back_from_their_json(paper_analysis):
    one = paper_analysis.architectures[0]
    point = optimum(paper_analysis.fit.law, one, 1e19)
    assert FrontierPoint.from_json(point.to_json()) == point
    assert Architecture.from_json(one.to_json()) == one


def test_public_names_exist():
    for name in scaling.__all__:
        assert hasattr(scaling, name)
