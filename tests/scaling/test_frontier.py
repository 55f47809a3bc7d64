"""Compute-optimal points against the closed form, and the exact polynomials in the width."""

import numpy as np
import pytest

import scaling
from scaling.frontier import architectures, frontier, optimum
from scaling.table import RunTable


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


def test_public_names_exist():
    for name in scaling.__all__:
        assert hasattr(scaling, name)
