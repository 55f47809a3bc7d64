"""Pairing of two tables: shared budgets, reused r = 1 runs, one split, refusals."""

import numpy as np
import pytest

from scaling.comparison.pairing import cells, pair_up, variant_table
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw


@pytest.fixture
def grids(make_grid, known_law):
    """A baseline and a variant with another φ, both with r = 1, 2, 4, losses without noise."""
    other = JointLaw(**{**vars(known_law), "phi": 0.4})
    baseline, variant = make_grid(known_law), make_grid(other)
    baseline.attrs["source"], variant.attrs["source"] = "baseline.csv", "variant.csv"
    return baseline, variant


def looped(frame):
    kept = frame[frame["recurrences"] > 1].reset_index(drop=True)
    kept.attrs["source"] = frame.attrs["source"]
    return kept


def pair(baseline, variant, split="text"):
    base = RunTable.of(baseline, split=split)
    return pair_up(base, variant_table(variant, base))


def test_r1_runs_of_the_baseline_stand_in_a_variant_without_any_and_this_is_said(grids):
    baseline, variant = grids
    found = pair(baseline, looped(variant))
    assert found.n_reused == 9  # 3 budgets x 3 widths
    assert found.cells_match
    assert any("9 of the baseline's were reused" in note for note in found.notes)
    ours, theirs = (
        table.runs[table.runs["r"] == 1][["n", "tokens", "loss"]].to_numpy()
        for table in (found.baseline, found.variant)
    )
    assert np.array_equal(ours, theirs)


def test_reused_r1_runs_keep_the_regression_split_of_their_own_table(paper):
    """Even where the variant's own regression has another line: here without injection matrices."""
    variant = paper[paper["recurrences"] > 1].copy()
    variant["n_rec"] -= variant["n_injection"]
    variant["n_injection"] = 0
    found = pair(paper, variant, "regression")
    names = ["n_once", "n_rec"]
    ours, theirs = (
        table.runs[table.runs["r"] == 1][names].to_numpy()
        for table in (found.baseline, found.variant)
    )
    assert np.array_equal(ours, theirs)
    whole = RunTable.of(paper, split="regression").runs
    whole = whole[(whole["r"] == 1) & (whole["hidden_size"] == 640)][names].to_numpy()
    again = found.variant.runs
    again = again[(again["r"] == 1) & (again["hidden_size"] == 640)][names].to_numpy()
    assert np.array_equal(np.unique(whole, axis=0), np.unique(again, axis=0))
    # The variant's looped rows lie on their own line, through the reused runs: 48 d² + 12 d² a layer.
    row = found.variant.runs.query("r == 4 and hidden_size == 640").iloc[0]
    assert row["n_once"] == pytest.approx(48 * 640**2, rel=1e-9)
    assert row["n_rec"] == pytest.approx(48 * 640**2, rel=1e-9)


def test_regression_split_of_a_variant_with_one_looped_r_takes_the_reused_runs(grids):
    baseline, variant = grids
    single = looped(variant[variant["recurrences"] != 2])
    found = pair(baseline, single, "regression")
    row = found.variant.runs.query("r == 4 and hidden_size == 64").iloc[0]
    assert row["n_once"] == pytest.approx(48 * 64**2, rel=1e-9)
    assert row["n_rec"] == pytest.approx(48 * 64**2, rel=1e-9)


def test_split_is_that_of_the_whole_table_when_few_budgets_are_shared(paper):
    """A subset would give the same line per width; the whole table's widths are needed for it."""
    variant = paper[(paper["recurrences"] > 1) & (paper["budget_flops"] < 5e18)]
    found = pair(paper, variant, "regression")
    whole = RunTable.of(paper, split="regression").runs.set_index("run_id")
    ours = found.variant.runs.set_index("run_id")
    # rel: the same least squares over the same architectures, in another order
    assert ours["n_rec"].to_numpy() == pytest.approx(
        whole.loc[ours.index, "n_rec"].to_numpy(), rel=1e-9
    )


def test_own_r1_runs_of_a_variant_are_used_and_this_is_said(grids):
    baseline, variant = grids
    variant["val_loss"] += 0.01
    found = pair(baseline, variant)
    assert found.n_reused == 0
    assert any("own 9 r = 1 runs were used" in note for note in found.notes)
    lifted = found.variant.runs["loss"] - found.baseline.runs["loss"]
    assert lifted[found.variant.runs["r"] == 1].to_numpy() == pytest.approx(0.01)


def test_r1_runs_of_the_baseline_inside_the_variants_file_are_recognised(grids):
    baseline, variant = grids  # without noise the r = 1 runs of both are equal
    found = pair(baseline, variant)
    assert any("9 r = 1 runs are the baseline's" in note for note in found.notes)


def test_only_budgets_with_looped_runs_in_both_are_kept(grids):
    baseline, variant = grids
    variant = variant[(variant["budget_flops"] != 1e14) | (variant["recurrences"] == 1)]
    found = pair(baseline, variant)
    assert found.budgets == (4e14, 1.6e15)
    assert cells(found.variant.runs) == {(c, r) for c in (4e14, 1.6e15) for r in (1, 2, 4)}


def test_budgets_that_differ_by_rounding_are_one(grids):
    baseline, variant = grids
    variant["budget_flops"] *= 1 + 1e-9
    assert pair(baseline, variant).budgets == (1e14, 4e14, 1.6e15)


def test_same_runs_in_another_order_and_under_other_names_are_identical(grids):
    baseline, _ = grids
    shuffled = baseline.sample(frac=1, random_state=3).reset_index(drop=True)
    shuffled["run_id"] = [f"run {k}" for k in range(len(shuffled))]
    assert pair(baseline, shuffled).identical
    part = shuffled[shuffled["recurrences"] <= 2].reset_index(drop=True)
    assert pair(baseline, part).identical
    assert not pair(baseline, grids[1]).identical


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.assign(budget_flops=v["budget_flops"] * 3), "share no budget"),
        (lambda v: v[v["budget_flops"] == 1e14], "share the budget 1e\\+14 alone"),
        (lambda v: v[v["recurrences"] == 1], "no run has recurrences > 1"),
        (lambda v: v.drop(columns="budget_flops"), "budget_flops is missing"),
        (lambda v: v.assign(vocab_size=50257), "vocab_size is 32064 in one and 50257"),
        (lambda v: v.assign(val_fingerprint="b"), "val_fingerprint is a in one and b in the other"),
        (lambda v: v.assign(corpus_fingerprint="d"), "trained on different corpora cannot be"),
    ],
)
def test_tables_that_cannot_be_compared_are_refused_with_the_reason(grids, change, says):
    baseline, variant = grids
    baseline = baseline.assign(vocab_size=32064, val_fingerprint="a", corpus_fingerprint="c")
    with pytest.raises(ValueError, match=says):
        pair(baseline, change(variant))


def test_different_splits_and_loss_columns_are_refused(grids):
    baseline, variant = grids
    with pytest.raises(ValueError, match="split is 'text' in one and 'once' in the other"):
        pair_up(RunTable.of(baseline), RunTable.of(variant, split="once"))
    variant["loss/knowledge"] = variant["val_loss"]
    with pytest.raises(ValueError, match="loss is 'val_loss' in one and 'loss/knowledge'"):
        pair_up(RunTable.of(baseline), RunTable.of(variant, loss="loss/knowledge"))


def test_other_training_data_or_recipe_is_noted(grids):
    baseline, variant = grids
    found = pair(baseline.assign(data_fingerprint="a"), variant.assign(data_fingerprint="b"))
    assert any("differ in training data" in note for note in found.notes)
