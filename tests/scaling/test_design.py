"""Planned grids against the paper's own table of runs, sums by hand, and what must be refused."""

import numpy as np
import pytest

from scaling.fits.fit import fit_joint
from scaling.optima.frontier import architectures
from scaling.planning.design import (
    PAPER_GRID,
    PAPER_LAW,
    Grid,
    grid_of,
    iso_depth,
    planned_runs,
    widths_around_optimum,
    with_halfway_budgets,
)
from scaling.planning.noise import Noise
from scaling.runs.table import RunTable

RS = (1, 2, 4, 8)
SMALL = Grid(budgets=(1e18, 4e18), widths=((512, 640), (640, 896, 1024)), recurrences=(1, 4))


def in_order(runs):
    return runs.sort_values(["budget_flops", "r", "hidden_size"]).reset_index(drop=True)


@pytest.mark.parametrize("split", ["text", "once", "regression"])
def test_the_papers_grid_has_the_counts_of_the_papers_runs(paper, split):
    planned = in_order(planned_runs(PAPER_GRID, iso_depth(RS, split=split)))
    runs = in_order(RunTable.of(paper, split=split).runs)
    assert len(planned) == len(runs) == 116
    for name in ("budget_flops", "r", "hidden_size"):
        assert (planned[name] == runs[name]).all()
    # read off least-squares polynomials: rounding of the 13th digit
    for name in ("train_flops_per_token", "n_once", "n_rec", "n"):
        np.testing.assert_allclose(planned[name], runs[name], rtol=1e-11, atol=1e-3)
    # the runs trained whole steps of 262,144 tokens
    assert (planned["tokens"] - runs["tokens"]).abs().max() <= 131_072 + 1


def test_grid_and_architectures_of_a_table_are_the_papers(paper):
    runs = RunTable.of(paper, split="regression").runs
    assert grid_of(runs) == PAPER_GRID
    family, _ = architectures(runs)
    for one, other in zip(family, iso_depth(RS), strict=True):
        for found, expected in zip(one.at(700.0), other.at(700.0), strict=True):
            assert found == pytest.approx(expected, rel=1e-9)  # polynomials through other widths


def test_runs_cost_what_their_tokens_take():
    """FLOPs per token times tokens, summed over the runs, is the grid's FLOPs."""
    runs = planned_runs(PAPER_GRID, iso_depth(RS))
    spent = float((runs["tokens"] * runs["train_flops_per_token"]).sum())
    assert PAPER_GRID.flops == pytest.approx(spent, rel=1e-12)
    # 4 r × (4·4.64e17 + 5·1e18 + 5·2.15e18 + 6·4.64e18 + 5·1e19 + 4·2.15e19)
    assert PAPER_GRID.flops == pytest.approx(7.25784e20, rel=1e-12)
    assert (PAPER_GRID.n_runs, PAPER_GRID.n_cells) == (116, 24)
    assert SMALL.flops_of([4]) == 2 * 1e18 + 3 * 4e18


def test_the_widths_tried_enclose_the_smallest_loss():
    family = iso_depth(RS)
    for budget in (1e17, 1e18, 2e19):
        widths = widths_around_optimum(PAPER_LAW, family, budget)
        assert len(widths) == 5
        runs = planned_runs(Grid(budgets=(budget,), widths=(widths,), recurrences=RS), family)
        loss = PAPER_LAW.loss(runs["n_once"], runs["n_rec"], runs["r"], runs["tokens"])
        mean = loss.groupby(runs["hidden_size"]).mean()
        assert widths[0] < mean.idxmin() < widths[-1]


def test_halfway_budgets_are_geometric_means_with_the_widths_of_both():
    dense = with_halfway_budgets(SMALL)
    assert dense.budgets == pytest.approx((1e18, 2e18, 4e18), rel=1e-12)
    assert dense.widths == ((512, 640), (512, 640, 896, 1024), (640, 896, 1024))
    assert dense.recurrences == SMALL.recurrences


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": (1e18,)}, "2 lists of widths for 1 budgets"),
        ({"budgets": (4e18, 1e18)}, r"budgets are \[4e\+18, 1e\+18\], but must be positive"),
        ({"budgets": (-1e18, 4e18)}, "must be positive"),
        ({"budgets": (1e18, float("inf"))}, "must be positive numbers"),
        ({"widths": ((512, 512), (640,))}, r"widths at 1e\+18 FLOPs .* none twice"),
        ({"widths": ((), (640,))}, "at least one"),
        ({"recurrences": (0, 2)}, "recurrences are"),
    ],
)
def test_an_impossible_grid_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Grid(**{**vars(SMALL), **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recurrences": (1, 3)}, "3 does not divide the 16 shared layers"),
        ({"recurrences": (0, 1)}, "0 does not divide"),
        (
            {"recurrences": RS, "effective_depth": 12},
            "effective_depth .* is 12, below shared_depth",
        ),
        ({"recurrences": RS, "vocab_size": 0}, "vocab_size .* is 0"),
        ({"recurrences": RS, "sequence_length": -1}, "sequence_length .* is -1"),
    ],
)
def test_an_impossible_family_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        iso_depth(**arguments)


def test_a_grid_with_an_r_that_nobody_has_is_refused(paper):
    with pytest.raises(ValueError, match=r"no architecture with r = 8 \(it has 1, 2, 4\)"):
        planned_runs(PAPER_GRID, iso_depth((1, 2, 4)))
    with pytest.raises(ValueError, match="column hidden_size is missing for some runs"):
        grid_of(RunTable.of(paper.drop(columns="hidden_size")).runs)


def test_a_budget_without_a_best_width_is_refused():
    with pytest.raises(ValueError, match="at 1 FLOPs the law has no best width"):
        widths_around_optimum(PAPER_LAW, iso_depth(RS), 1.0)


def test_the_default_noise_is_that_of_the_papers_runs(paper):
    found = Noise.of(fit_joint(RunTable.of(paper, split="regression"), n_starts=40))
    assert found.run == pytest.approx(Noise().run, abs=5e-4)
    assert found.cell == pytest.approx(Noise().cell, abs=5e-4)


def test_noise_is_recovered_from_residuals_with_shared_and_own_parts(paper):
    """300 cells of 12 runs: standard errors are 1.2 % of the own part, 5 % of the shared one."""
    fit = fit_joint(RunTable.of(paper), n_starts=20)
    generator = np.random.default_rng(3)
    cell = np.repeat(np.arange(300), 12)
    residual = 0.006 * generator.normal(size=300)[cell] + 0.01 * generator.normal(size=3600)
    runs = fit.runs.iloc[np.zeros(3600, dtype=int)].assign(
        residual=residual, budget_flops=1.0 + cell, r=1
    )
    object.__setattr__(fit, "runs", runs)
    found = Noise.of(fit)
    assert found.run == pytest.approx(0.01, rel=0.04)
    assert found.cell == pytest.approx(0.006, rel=0.15)
    object.__setattr__(fit, "runs", runs.drop(columns="budget_flops"))
    alone = Noise.of(fit)
    assert (alone.run, alone.cell) == (pytest.approx(np.sqrt(np.mean(residual**2))), 0.0)


@pytest.mark.parametrize(
    ("run", "cell", "message"),
    [(-1, 0, "run .* is -1"), (0.01, float("nan"), "cell .* is nan"), (0, 0, "are both 0")],
)
def test_impossible_noise_is_refused(run, cell, message):
    with pytest.raises(ValueError, match=message):
        Noise(run=run, cell=cell)
