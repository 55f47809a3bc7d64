"""The cheapest grid against brute force over every part, and what it costs against sums by hand."""

from dataclasses import replace

import numpy as np
import pytest

from scaling.planning.cheapest import (
    MIN_CELLS,
    MIN_WIDTHS,
    Choice,
    candidates,
    cheapest,
    cost,
    parts,
    rows_of,
)
from scaling.planning.design import PAPER_GRID, PAPER_LAW, Grid, iso_depth, planned_runs
from scaling.planning.forecast import Sensitivity, approximate_width, simulate
from scaling.planning.noise import Noise

RS = (1, 2, 4, 8)
NOISE = Noise()
SPACE = Grid(
    budgets=(4.64e17, 1e18, 2.15e18, 4.64e18, 1e19),
    widths=tuple((384, 512, 640, 896, 1280) for _ in range(5)),
    recurrences=(1, 2, 4),
)


@pytest.fixture(scope="module")
def family():
    return iso_depth(RS)


@pytest.fixture(scope="module")
def among(family):
    return candidates(SPACE, family, PAPER_LAW, NOISE)


@pytest.fixture(scope="module")
def simulated(among):
    """Every candidate simulated, briefly."""
    return {
        index: simulate(
            planned_runs(grid, among.family), PAPER_LAW, NOISE,
            n_sets=12, n_bootstrapped=3, resamples=20,
        )
        for index, grid in enumerate(among.grids)
    }  # fmt: skip


def scaled(among, factor):
    """Simulations that find `factor` times the promised width."""
    runs = planned_runs(SPACE, among.family)
    one = simulate(runs, PAPER_LAW, NOISE, n_sets=2, n_bootstrapped=0)
    return {
        index: replace(one, expected=factor * width) for index, width in enumerate(among.widths)
    }


def found(among, target, known, minimise="flops"):
    return cheapest(among, target, minimise=minimise, known=known)


@pytest.mark.parametrize("minimise", ["flops", "runs"])
@pytest.mark.parametrize("target", [0.16, 0.2, 0.25])
def test_no_cheaper_part_reaches_the_width_when_promises_are_kept(among, target, minimise):
    known = scaled(among, 1.0)
    choice = found(among, target, known, minimise)
    costs = among.flops if minimise == "flops" else among.n_runs
    reaching = [k for k in known if known[k].width <= target]
    assert getattr(choice, "flops" if minimise == "flops" else "n_runs") == min(costs[reaching])
    assert choice.forecast.width <= target


@pytest.mark.parametrize("minimise", ["flops", "runs"])
def test_promises_broken_by_a_tenth_cost_at_most_the_next_step(among, minimise):
    """After a broken promise the next must promise 3 % less: no dearer than brute force 3 % below."""
    known = scaled(among, 1.1)
    choice = found(among, 0.2, known, minimise)
    costs = among.flops if minimise == "flops" else among.n_runs
    reaching = [k for k in known if known[k].width <= 0.97 * 0.2]
    own = choice.flops if minimise == "flops" else choice.n_runs
    assert own <= min(costs[reaching])
    assert choice.forecast.width <= 0.2


@pytest.mark.parametrize("target", [0.2, 0.25, 0.3])
def test_every_cheaper_part_was_tried_or_promised_too_little(among, simulated, target):
    """With real simulations: a cheaper part failed, or promised at most 3 % less than one that did."""
    choice = found(among, target, simulated)
    assert choice.forecast.width <= target
    cheaper = np.flatnonzero(among.flops < choice.flops)
    tried = [k for k in cheaper if among.widths[k] <= target]
    failed = [k for k in tried if simulated[k].width > target]
    for k in set(tried) - set(failed):
        assert any(
            among.flops[j] <= among.flops[k] and among.widths[k] > 0.97 * among.widths[j]
            for j in failed
        )


def test_the_width_of_a_part_is_that_of_its_own_runs(among, family):
    """Rows picked from the whole grid's sensitivity, against a sensitivity of the part alone."""
    for index in (0, len(among.grids) // 2, len(among.grids) - 1):
        runs = planned_runs(among.grids[index], family)
        own = approximate_width(Sensitivity.of(runs, PAPER_LAW, NOISE), np.arange(len(runs)))
        assert among.widths[index] == pytest.approx(own, rel=1e-6)  # a matrix of condition 1e8


def test_parts_keep_cells_widths_and_the_smallest_r():
    grids = list(parts(PAPER_GRID))
    assert PAPER_GRID in grids
    assert len(grids) == len({str(grid) for grid in grids})
    for grid in grids:
        assert grid.n_cells >= MIN_CELLS
        assert min(map(len, grid.widths)) >= MIN_WIDTHS
        assert grid.recurrences[0] == 1 and len(grid.recurrences) >= 2
        for budget, widths in zip(grid.budgets, grid.widths, strict=True):
            whole = PAPER_GRID.widths[PAPER_GRID.budgets.index(budget)]
            assert set(widths) <= set(whole)
            assert (widths[0], widths[-1]) == (whole[0], whole[-1])


def test_parts_of_many_budgets_are_evenly_spaced():
    budgets = tuple(float(k) for k in range(1, 11))
    many = Grid(budgets=budgets, widths=((64, 96, 128),) * 10, recurrences=(1, 2, 4, 8))
    chosen = {grid.budgets for grid in parts(many)}
    assert budgets in chosen and budgets[::2] in chosen and budgets[1:4] in chosen
    assert all(len(set(np.diff(one))) == 1 for one in chosen)


def test_rows_of_a_part_are_its_own_runs(family):
    runs = planned_runs(PAPER_GRID, family)
    for grid in list(parts(PAPER_GRID))[::97]:
        picked = runs.iloc[rows_of(grid, runs)]
        assert sorted(picked["run_id"]) == sorted(planned_runs(grid, family)["run_id"])


def test_a_difference_costs_both_sweeps_with_the_unlooped_runs_once():
    # baseline 3 r × 5 budgets × 5 widths = 75, variant 2 r: 50
    assert cost(SPACE, None) == (75, pytest.approx(15 * sum(SPACE.budgets)))
    assert cost(SPACE, 0.1) == (125, pytest.approx(25 * sum(SPACE.budgets)))


def test_a_width_out_of_reach_says_so(among):
    choice = found(among, 1e-4, {})
    assert choice.grid is None and choice.forecast is None and choice.n_simulated == 0
    assert f"none of {len(among.grids)} part grids gets there" in choice.reason
    assert f"{among.widths.min():.3f}" in choice.reason


def test_promises_broken_by_all_say_so(among):
    broken = found(among, 0.3, scaled(among, 9.0))
    assert broken.grid is None
    assert f"the {broken.n_simulated} cheapest grids that promised as much broke" in broken.reason


def test_a_wrong_request_is_refused(among, family):
    with pytest.raises(ValueError, match="target is 0, but an interval's width is positive"):
        cheapest(among, 0)
    with pytest.raises(ValueError, match="minimise is 'time', but must be flops or runs"):
        cheapest(among, 0.1, minimise="time")
    alone = replace(SPACE, recurrences=(2,))
    with pytest.raises(ValueError, match="r = 2 alone"):
        candidates(alone, family, PAPER_LAW, NOISE)


def test_a_choice_survives_json(among, simulated):
    choice = found(among, 0.25, simulated)
    assert Choice.from_json(choice.to_json()) == choice
