"""An E per architecture: known floors come back, and one floor is not mistaken for several."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import chi2

from scaling import RunTable, fit_joint
from scaling.fits.per_architecture import FloorComparison, fit_floors, render_floors, robust_drop

FLOORS = {1: 1.60, 2: 1.55, 4: 1.68}


@pytest.fixture(scope="module")
def floored(make_grid, known_law):
    """Noiseless runs of the known law with an E that depends on r."""
    grid = make_grid(known_law)
    grid["val_loss"] += grid["recurrences"].map(FLOORS) - known_law.E
    return grid


def test_known_floors_are_recovered_with_the_shared_parameters(floored, known_law):
    found = fit_floors(RunTable.of(floored), n_starts=50)
    assert {one.r: one.E for one in found.floors} == pytest.approx(FLOORS, rel=1e-5)
    for name in ("A", "alpha", "B", "beta", "phi"):
        # residuals end near 1e-12; the Hessian's condition (1e6) magnifies them
        assert getattr(found, name) == pytest.approx(getattr(known_law, name), rel=1e-4)
    assert found.spread == pytest.approx(0.13, abs=1e-4)
    assert found.p < 1e-6


def test_one_floor_is_found_to_be_enough(make_grid, known_law):
    budgets = (1e14, 2e14, 4e14, 8e14, 1.6e15, 3.2e15)
    found = fit_floors(RunTable.of(make_grid(known_law, budgets=budgets, noise=0.003)), n_starts=50)
    assert found.p > 0.05
    assert (found.dof, found.n_cells) == (2, 18)
    assert "One shared E is enough" in render_floors(found)


def test_more_parameters_never_fit_worse(paper):
    """The joint law is a case of the other, so that the objective can only fall."""
    for split in ("text", "regression"):
        found = fit_floors(RunTable.of(paper, split=split), n_starts=50)
        assert found.objective <= found.shared_objective
        assert found.ratio == pytest.approx(
            2 * 116 * np.log(found.shared_objective / found.objective), rel=1e-12
        )


def test_the_papers_runs_move_their_floor_by_little(paper):
    """Measured here, nothing published: E differs by 0.013 nats, and φ rises to 0.53."""
    found = fit_floors(RunTable.of(paper, split="regression"), n_starts=50)
    assert found.shared_phi == pytest.approx(0.4585, abs=5e-4)
    assert found.shared_r2 == pytest.approx(0.9972, abs=1e-4)
    assert found.phi == pytest.approx(0.526, abs=2e-3)
    assert found.spread == pytest.approx(0.0127, abs=5e-4)
    assert found.rmse < found.shared_rmse


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "most"), [(0.0, 0.10), (0.5, 0.18)])
def test_one_true_floor_is_rejected_about_as_often_as_the_test_says(paper, shared, most):
    """At p < 0.05, on the paper's grid; `shared` is the part of the variance that a cell's runs share.

    150 sets know a rate of 5 % to 1.8 % and one of 10 % to 2.4 %: `most` is three of these above what
    250 sets gave (1 to 5 %, and 10 %). The likelihood ratio's own rate is far higher.
    """
    table = RunTable.of(paper, split="regression")
    true = fit_joint(table, n_starts=50).runs["predicted"].to_numpy()
    cells = table.runs.groupby(["budget_flops", "r"]).ngroup().to_numpy()
    generator = np.random.default_rng(1)
    robust, plain = 0, 0
    for _ in range(150):
        noise = np.sqrt(1 - shared) * generator.normal(size=116)
        noise += np.sqrt(shared) * generator.normal(size=24)[cells]
        runs = table.runs.assign(loss=true * np.exp(0.01 * noise))
        found = fit_floors(replace(table, runs=runs), n_starts=5)
        robust += found.p < 0.05
        plain += found.ratio > chi2.isf(0.05, found.dof)
    assert robust / 150 <= most
    assert plain > 2 * robust


def test_without_budgets_the_runs_are_taken_as_independent(paper, unwrapped):
    table = RunTable.of(paper.drop(columns="budget_flops"), split="regression")
    found = fit_floors(table, n_starts=50)
    assert found.n_cells is None
    assert found.p == pytest.approx(chi2.sf(found.statistic, 3), rel=1e-12)
    assert "independent runs assumed" in unwrapped(render_floors(found))


def test_the_robust_drop_is_the_squared_t_of_a_mean():
    """One location parameter, δ beyond every residual: the drop is n·mean²/2, the statistic t²."""
    values = np.random.default_rng(0).normal(0.2, 1.0, size=40)
    residual = values.mean() - values
    drop = (np.sum(values**2) - np.sum(residual**2)) / 2
    expected = 40 * values.mean() ** 2 / values.var()
    assert robust_drop(residual, drop, 50.0, None) == pytest.approx(expected, rel=1e-12)


def test_cells_that_share_errors_weaken_the_test():
    residual = np.repeat([1e-3, -1e-3, 2e-3, -2e-3], 5)
    alone = robust_drop(residual, 1e-5, 1e-3, None)
    together = robust_drop(residual, 1e-5, 1e-3, np.repeat(np.arange(4), 5))
    assert together == pytest.approx(alone / 5, rel=1e-12)  # five runs say what one does


def test_without_a_worth_of_recurrences_the_floors_have_to_move(paper):
    """At φ = 0 and φ = 1 the law misplaces r, and E per architecture takes the blame."""
    table = RunTable.of(paper, split="regression")
    free = fit_floors(table, n_starts=50)
    for phi in (0.0, 1.0):
        held = fit_floors(table, phi=phi, n_starts=50)
        assert held.phi == phi == held.shared_phi
        assert held.ratio > 10 * free.ratio
        assert held.spread > 3 * free.spread


def test_predictions_are_those_of_the_law(floored):
    table = RunTable.of(floored)
    found = fit_floors(table, n_starts=20)
    e = table.runs["r"].map({one.r: one.E for one in found.floors})
    n_eff = table.runs["n_once"] + table.runs["r"] ** found.phi * table.runs["n_rec"]
    expected = e + found.A * n_eff**-found.alpha + found.B * table.runs["tokens"] ** -found.beta
    np.testing.assert_allclose(found.predicted, expected, rtol=1e-12)
    assert found.run_ids == tuple(table.runs["run_id"])


def test_a_single_architecture_is_refused(make_grid, known_law):
    with pytest.raises(ValueError, match=r"one architecture \(r = 2\).*another r"):
        fit_floors(RunTable.of(make_grid(known_law, rs=(2,))))


def test_an_architecture_of_one_width_is_refused_by_name(make_grid, known_law):
    grid = make_grid(known_law)
    keep = (grid["recurrences"] != 4) | (grid["hidden_size"] == 96)
    with pytest.raises(ValueError, match=r"r = 4 has 1 parameter count"):
        fit_floors(RunTable.of(grid[keep].reset_index(drop=True)))


def test_too_few_runs_are_refused(make_grid, known_law):
    grid = make_grid(known_law, budgets=(1e14,), widths=(64, 96), rs=(1, 2, 4))
    with pytest.raises(ValueError, match=r"6 runs.*8 parameters"):
        fit_floors(RunTable.of(grid))


def test_results_survive_json(floored):
    found = fit_floors(RunTable.of(floored), n_starts=20)
    assert FloorComparison.from_json(found.to_json()) == found


def test_an_effective_depth_is_an_architecture_of_its_own(make_grid, known_law):
    shallow = make_grid(known_law).assign(effective_depth=18)
    deep = make_grid(known_law).assign(effective_depth=24)
    deep["run_id"] += "-deep"
    deep[["n_once", "n_rec"]] *= 2
    deep["tokens"] /= 2
    both = pd.concat([shallow, deep], ignore_index=True)
    both["val_loss"] = known_law.loss(
        both["n_once"], both["n_rec"], both["recurrences"], both["tokens"]
    )
    found = fit_floors(RunTable.of(both), n_starts=20)
    assert [(one.r, one.effective_depth) for one in found.floors] == [
        (r, depth) for r in (1, 2, 4) for depth in (18, 24)
    ]
