"""Parabola minima: the paper's table, exact quadratics, cells without a minimum."""

import numpy as np
import pandas as pd
import pytest

from scaling.optima.isoflops import isoflops_minima
from scaling.runs.table import RunTable

BUDGETS = (4.64e17, 1e18, 2.15e18, 4.64e18, 1e19, 2.15e19)
PUBLISHED = {  # loss and N in millions at the compute optimum, for the six budgets
    1: (
        (2.85229, 2.71843, 2.60477, 2.49763, 2.40137, 2.30879),
        (67.80, 108.95, 166.60, 253.25, 353.37, 544.94),
    ),
    2: (
        (2.91370, 2.77380, 2.64516, 2.53369, 2.43121, 2.33887),
        (38.24, 63.19, 101.32, 161.69, 253.73, 381.11),
    ),
    4: (
        (2.93572, 2.79633, 2.67062, 2.55909, 2.45823, 2.35991),
        (28.10, 45.29, 71.62, 118.68, 183.44, 305.82),
    ),
    8: (
        (2.97679, 2.83809, 2.70892, 2.59768, 2.49499, 2.40210),
        (22.61, 39.23, 65.35, 96.76, 155.47, 243.09),
    ),
}


def cell(log_n, loss, r=1):
    n = np.exp(np.asarray(log_n, dtype=float))
    return pd.DataFrame({"budget_flops": 1e18, "r": r, "n": n, "loss": loss})


def test_minima_of_the_paper_runs_match_the_published_points(paper_analysis):
    found = {(m.budget_flops, m.r): m for m in paper_analysis.minima}
    assert len(found) == 24
    for r, (losses, sizes) in PUBLISHED.items():
        for budget, loss, size in zip(BUDGETS, losses, sizes, strict=True):
            minimum = found[budget, r]
            assert minimum.loss == pytest.approx(loss, abs=2e-4)  # losses read off a figure to 1e-4
            assert minimum.n == pytest.approx(
                size * 1e6, rel=2e-3
            )  # N with or without the norms' gains


def test_an_exact_quadratic_gives_its_vertex():
    log_n = np.log([1e7, 2e7, 5e7, 9e7])
    (minimum,) = isoflops_minima(cell(log_n, 2.5 + 0.1 * (log_n - np.log(3e7)) ** 2))
    assert minimum.n == pytest.approx(
        3e7, rel=1e-9
    )  # least squares of exact data, conditioning about 1e3
    assert minimum.loss == pytest.approx(2.5, rel=1e-12)


@pytest.mark.parametrize(
    ("log_n", "loss", "reason"),
    [
        ([1.0, 2.0, 3.0], [2.0, 2.2, 2.1], "not convex"),
        ([1.0, 2.0, 3.0], [3.0, 2.5, 2.4], None),
        ([1.0, 2.0, 3.0], [3.0, 2.5, 2.2], "towards the largest size"),
        ([1.0, 2.0, 3.0], [2.2, 2.5, 3.0], "towards the smallest size"),
        ([1.0, 2.0, 2.0], [2.2, 2.5, 3.0], "2 sizes, a parabola needs 3"),
    ],
)
def test_a_minimum_outside_the_sizes_or_of_a_hill_is_not_determined(log_n, loss, reason):
    (minimum,) = isoflops_minima(cell(log_n, loss))
    if reason is None:
        assert minimum.reason is None and minimum.n is not None
    else:
        assert reason in minimum.reason
        assert minimum.n is None and minimum.loss is None


def test_seeds_enter_as_their_mean_when_every_size_has_as_many():
    log_n = np.array([1.0, 2.0, 3.0])
    noisy = pd.concat([cell(log_n, [2.4, 2.1, 2.3]), cell(log_n, [2.6, 2.3, 2.3])])
    (both,), (mean,) = isoflops_minima(noisy), isoflops_minima(cell(log_n, [2.5, 2.2, 2.3]))
    assert both.n_runs == 6 and both.n_sizes == 3
    assert both.loss == pytest.approx(mean.loss, rel=1e-12)


def test_without_budgets_there_are_no_minima():
    assert isoflops_minima(cell([1, 2, 3], [3, 2, 3]).drop(columns="budget_flops")) == ()


def test_depths_at_the_same_widths_have_cells_of_their_own(make_grid, known_law):
    """Two depths of one r are two parabolas: N differs at equal width."""
    grid = make_grid(known_law)
    deep = grid.assign(run_id="deep-" + grid["run_id"], n_once=grid["n_once"] * 2)
    deep["tokens"] *= 0.8
    pooled = pd.concat([grid.assign(effective_depth=20), deep.assign(effective_depth=24)])
    found = isoflops_minima(RunTable.of(pooled).runs)
    assert [(m.budget_flops, m.r, m.effective_depth) for m in found] == [
        (budget, r, depth)
        for budget in (1e14, 4e14, 1.6e15)
        for r in (1, 2, 4)
        for depth in (20.0, 24.0)
    ]
    assert all(m.n_runs == m.n_sizes == 3 for m in found)


def test_a_depth_of_each_width_leaves_the_cell_whole(make_grid, known_law):
    grid = make_grid(known_law)
    alone = isoflops_minima(RunTable.of(grid).runs)
    deeper = isoflops_minima(
        RunTable.of(grid.assign(effective_depth=grid["hidden_size"] // 4)).runs
    )
    assert deeper == alone and len(alone) == 9
