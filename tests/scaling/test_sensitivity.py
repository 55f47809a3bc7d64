"""φ under every split of N, against the known values of the paper's runs."""

import pytest

from scaling import RunTable, fit_joint
from scaling.fits.sensitivity import (
    WITHOUT,
    SplitSensitivity,
    render_sensitivity,
    split_sensitivity,
    under_split,
)


@pytest.fixture(scope="module")
def found(_paper):
    return split_sensitivity(_paper, n_starts=50)


def test_every_split_gives_its_known_phi(found):
    phi = {row.split: row.phi for row in found.rows}
    assert phi["regression"] == pytest.approx(0.4585, abs=5e-4)
    assert phi["once"] == pytest.approx(0.4575, abs=7e-4)
    assert phi["text"] == pytest.approx(0.433, abs=1e-3)
    assert phi[WITHOUT] == pytest.approx(0.472, abs=1e-3)  # measured here, nothing published
    assert found.spread == pytest.approx(phi[WITHOUT] - phi["text"], rel=1e-12)


def test_every_split_describes_the_runs_equally_well(found):
    """Which is why the runs cannot settle the split."""
    for row in found.rows:
        assert row.r2 == pytest.approx(0.9972, abs=2e-4)
        assert row.interval[0] < row.phi < row.interval[1]
        assert row.reason is None


def test_the_interval_is_that_of_the_split_alone(found):
    regression = next(row for row in found.rows if row.split == "regression")
    assert regression.interval[0] == pytest.approx(0.414, abs=0.01)  # published [0.41, 0.53]


def test_without_injection_counts_it_nowhere(paper):
    runs = under_split(paper, WITHOUT).runs
    assert (runs["n_rec"] == paper["n_rec"] - paper["n_injection"]).all()
    assert (runs["n_once"] == paper["n_once"]).all()


def test_without_an_injection_the_splits_agree(make_grid, known_law):
    found = split_sensitivity(make_grid(known_law, noise=0.003), n_starts=50, resamples=20)
    phi = {row.split: row.phi for row in found.rows}
    assert phi["once"] == phi["text"] == phi[WITHOUT]
    # n_once + n_rec = 48·d² + 12·d²·16/r exactly, so that the regression returns the counts
    assert phi["regression"] == pytest.approx(phi["text"], abs=1e-7)


def test_a_split_that_cannot_be_computed_says_why(paper, unwrapped):
    """One missing column does not take the other splits away."""
    found = split_sensitivity(paper.drop(columns="n_injection"), n_starts=20, resamples=20)
    by_split = {row.split: row for row in found.rows}
    assert by_split["text"].reason is None
    assert by_split["regression"].reason is None
    for split in ("once", WITHOUT):
        assert by_split[split].phi is None
        assert "n_injection" in by_split[split].reason
    assert by_split["once"].reason in unwrapped(render_sensitivity(found))


def test_without_budgets_phi_stands_and_the_interval_says_why(paper):
    found = split_sensitivity(paper.drop(columns="budget_flops"), n_starts=20)
    for row in found.rows:
        assert row.phi is not None
        assert row.interval is None
        assert "budget_flops" in row.reason
    assert found.widest is None


def test_a_table_unfit_for_every_split_is_refused(paper):
    paper.loc[3, "val_loss"] = -1.0
    with pytest.raises(ValueError, match="val_loss is -1"):
        split_sensitivity(paper)


def test_a_model_that_is_all_injection_is_refused(make_grid, known_law):
    grid = make_grid(known_law)
    grid.loc[0, ["n_once", "n_rec", "n_injection"]] = 0, 1000, 1000
    with pytest.raises(ValueError, match=r"n_injection is all of the model's"):
        under_split(grid, WITHOUT)


def test_the_fit_is_that_of_the_split(paper, found):
    fit = fit_joint(RunTable.of(paper, split="once"), n_starts=50)
    row = next(one for one in found.rows if one.split == "once")
    assert (row.phi, row.alpha, row.r2) == (fit.law.phi, fit.law.alpha, fit.r2)


def test_the_text_holds_the_numbers_and_json_survives(found, unwrapped):
    text = unwrapped(render_sensitivity(found))
    for row in found.rows:
        assert f"{row.phi:.4f}" in text
        assert row.meaning in text
    assert SplitSensitivity.from_json(found.to_json()) == found
