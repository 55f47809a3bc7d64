"""φ per task axis: recovered where there is a law, refused with a reason where there is noise."""

import numpy as np
import pytest

from scaling.reports.axes import (
    AxisFit,
    Thresholds,
    axis_fit,
    axis_fits,
    between_r,
    loss_columns,
    seed_means,
)
from scaling.reports.axes_report import NOISY, as_json, axes_json, render_axes
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw

QUICK = {"n_starts": 40, "resamples": 60}
MATH = JointLaw(E=1.0, A=40.0, alpha=0.22, B=500.0, beta=0.34, phi=0.8)


@pytest.fixture
def grid(make_grid, known_law):
    """Four budgets × three r × four widths × two seeds with one axis that has a law, one without."""
    frame = make_grid(known_law, (1e14, 4e14, 1.6e15, 6e15), (64, 96, 128, 192), seeds=2)
    generator = np.random.default_rng(1)
    clean = MATH.loss(frame["n_once"], frame["n_rec"], frame["recurrences"], frame["tokens"])
    frame["loss/math"] = clean + 0.004 * generator.normal(size=len(frame))
    frame["loss/noise"] = 2.0 + 0.1 * generator.normal(size=len(frame))
    return frame


def test_an_axis_with_a_law_gives_its_own_phi(grid):
    found = axis_fit(grid, "loss/math", **QUICK)
    assert found.reason is None
    assert found.phi_ci[0] <= MATH.phi <= found.phi_ci[1]  # 95 %, at a fixed draw of the noise
    assert found.phi == found.fit.law.phi
    assert found.phi == pytest.approx(MATH.phi, abs=0.1)


def test_an_axis_of_noise_has_no_phi_and_says_why(grid):
    found = axis_fit(grid, "loss/noise", **QUICK)
    assert found.phi is None and found.phi_ci is None
    assert "over seeds" in found.reason and "above 0.5" in found.reason
    assert "wide" in found.reason or "bound" in found.reason
    value = as_json(found)
    assert value["phi"] is None and value["reason"] == found.reason
    assert value["fitted"]["phi"] == found.fit.law.phi


def test_the_wanted_width_decides_whether_an_axis_is_too_noisy(grid):
    found = axis_fit(grid, "loss/math", **QUICK)
    width = found.phi_ci[1] - found.phi_ci[0]
    strict = axis_fit(grid, "loss/math", thresholds=Thresholds(max_width=0.9 * width), **QUICK)
    assert strict.phi is None
    assert f"{width:.2f} wide, above {0.9 * width:g}" in strict.reason
    loose = axis_fit(grid, "loss/math", thresholds=Thresholds(max_width=1.1 * width), **QUICK)
    assert loose.phi == found.phi


def test_the_seeds_spread_decides_whether_an_axis_is_too_noisy(grid):
    share = axis_fit(grid, "loss/math", **QUICK).seed_share
    strict = Thresholds(max_seed_share=0.9 * share)
    found = axis_fit(grid, "loss/math", thresholds=strict, **QUICK)
    assert found.phi is None
    assert found.reason.startswith("one run varies over seeds by")


def test_runs_without_a_value_are_left_out_by_name(grid):
    absent = list(grid["run_id"][[3, 17, 40]])
    grid.loc[[3, 17, 40], "loss/math"] = np.nan
    grid.loc[50, "status"] = "failed"
    grid.loc[50, "loss/math"] = np.nan  # not finished: left out by its status
    found = axis_fit(grid, "loss/math", **QUICK)
    assert found.missing == tuple(absent)
    assert found.n_runs == len(grid) - 4
    assert found.fit.n_left_out == {"failed": 1}
    assert found.phi == pytest.approx(
        axis_fit(grid.drop([3, 17, 40]), "loss/math", **QUICK).phi, rel=1e-12
    )
    text = render_axes([found])
    assert "3 finished runs have no value" in text
    assert all(name in text for name in absent)


def test_an_axis_that_nobody_evaluated_has_a_reason(grid):
    grid["loss/empty"] = np.nan
    found = axis_fit(grid, "loss/empty", **QUICK)
    assert found.phi is None and found.n_runs == 0
    assert found.reason == "no finished run has a value of loss/empty"
    assert len(found.missing) == len(grid)


def test_a_design_that_identifies_nothing_is_a_reason_not_an_error(grid):
    found = axis_fit(grid[grid["recurrences"] == 2], "loss/math", **QUICK)
    assert found.phi is None and found.fit is None
    assert "all runs have recurrences = 2" in found.reason
    assert found.spread.sd == pytest.approx(0.004, rel=0.5)  # 16 degrees of freedom


def test_without_budgets_there_is_no_interval_and_no_phi(grid):
    found = axis_fit(grid.drop(columns="budget_flops"), "loss/math", **QUICK)
    assert found.phi is None
    assert "budget_flops is missing" in found.reason
    assert found.fit.law.phi == pytest.approx(MATH.phi, abs=0.1)


def test_a_loss_that_does_not_depend_on_n_stops_on_a_bound(grid):
    grid["loss/data"] = 1.0 + 900 * grid["tokens"] ** -0.35
    found = axis_fit(grid.assign(seed=0).iloc[::2], "loss/data", **QUICK)
    assert found.phi is None
    assert "alpha stopped on a bound of the search" in found.reason


def test_phi_by_seed_is_that_of_each_seeds_table(grid):
    found = axis_fit(grid, "loss/math", **QUICK).by_seed
    own = [axis_fit(grid[grid["seed"] == one], "loss/math", **QUICK).fit.law.phi for one in (0, 1)]
    assert found.seeds == (0.0, 1.0)
    # the same optimum of the same sum
    assert found.phis == pytest.approx(own, rel=1e-12)
    assert found.mean == pytest.approx(sum(own) / 2, rel=1e-12)
    assert found.sd == pytest.approx(abs(own[0] - own[1]) / np.sqrt(2), rel=1e-9)


def test_a_seed_of_few_runs_has_no_phi_of_its_own(grid):
    part = grid[(grid["seed"] == 0) | (grid["hidden_size"] == 64)]
    found = axis_fit(part, "loss/math", **QUICK)
    assert found.phi is not None
    assert found.by_seed.mean is None
    assert "seed 1 alone (12 runs) identifies no law" in found.by_seed.reason


def test_means_over_seeds_are_those_of_pandas(grid):
    means = seed_means(RunTable.of(grid, loss="loss/math").runs)
    keys = ["budget_flops", "recurrences", "hidden_size"]
    expected = grid.groupby(keys)["loss/math"].agg(["mean", "std", "size"])
    assert len(means) == len(expected)
    by_key = {(one.budget_flops, one.r, round(one.n)): one for one in means}
    for (budget, r, width), row in expected.iterrows():
        one = by_key[budget, r, 48 * width**2 + 192 * width**2 // r]
        # sums in another order
        assert (one.mean, one.sd) == pytest.approx((row["mean"], row["std"]), rel=1e-9)
        assert one.n_seeds == row["size"]


def test_the_spread_between_r_is_the_sd_of_the_best_losses(grid):
    """By hand: per budget the sd over r of the smallest mean loss, pooled with equal weights."""
    variances = []
    for _, cell in grid.groupby("budget_flops"):
        best = [
            min(width["loss/math"].mean() for _, width in one.groupby("hidden_size"))
            for _, one in cell.groupby("recurrences")
        ]
        variances.append(np.var(best, ddof=1))
    found = between_r(RunTable.of(grid, loss="loss/math").runs)
    assert found == pytest.approx(np.sqrt(np.mean(variances)), rel=1e-12)


def test_missing_values_that_leave_no_split_are_a_reason(grid):
    """The regression needs two r at every width; whole, the table has them."""
    assert axis_fit(grid, "loss/math", split="regression", **QUICK).phi is not None
    alone = (grid["hidden_size"] == 96) & (grid["recurrences"] > 1)
    grid.loc[alone, "loss/math"] = np.nan
    found = axis_fit(grid, "loss/math", split="regression", **QUICK)
    assert found.phi is None and len(found.missing) == alone.sum()
    assert "no split over the runs with a value" in found.reason
    assert "width 96 has runs of a single" in found.reason
    with pytest.raises(ValueError, match="n_injection is missing"):
        axis_fit(grid.drop(columns="n_injection").fillna(2.0), "loss/math", split="once")


def test_a_bad_value_or_an_unknown_axis_is_an_error(grid):
    with pytest.raises(ValueError, match=r"column loss/maths is missing .*loss/math, loss/noise"):
        axis_fit(grid, "loss/maths")
    grid.loc[5, "loss/math"] = -1.0
    with pytest.raises(ValueError, match=r"row 6 .*loss/math is -1"):
        axis_fit(grid, "loss/math")
    with pytest.raises(ValueError, match="max_width is 0"):
        Thresholds(max_width=0)


def test_all_axes_of_a_table_stand_in_one_text_and_one_json(grid):
    assert loss_columns(grid) == ("loss/math", "loss/noise")
    fits = axis_fits(grid, **QUICK)
    text = render_axes(fits)
    row = next(line for line in text.splitlines() if line.startswith("| loss/math"))
    assert f"{fits[0].phi:.3f}" in row
    assert NOISY in next(line for line in text.splitlines() if line.startswith("| loss/noise"))
    assert fits[1].reason[:40] in " ".join(text.split())
    for name in ("max_width", "max_seed_share"):
        assert f"{getattr(fits[0].thresholds, name):g}" in text
    largest = [one for one in fits[0].settings if one.budget_flops == 6e15 and one.r == 4]
    best = min(largest, key=lambda one: one.mean)
    assert f"{best.mean:.4f} ± {best.sd:.4f} (2)" in text
    assert list(axes_json(fits)) == ["loss/math", "loss/noise"]
    assert AxisFit.from_json(fits[0].to_json()).phi == fits[0].phi
    assert render_axes([]) == "The table has no loss/… columns."
