"""Δφ: recovery of known shifts, intervals, pairing, verdicts, and the paper's two case studies."""

import json

import numpy as np
import pandas as pd
import pytest

from scaling.comparison.compare import Comparison, as_json, compare
from scaling.comparison.compare_report import render
from scaling.comparison.pairing import variant_table
from scaling.fits.bootstrap import bootstrap
from scaling.fits.fit import fit_joint
from scaling.optima.frontier import architectures, optimum
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw

BUDGETS = (1e14, 2.15e14, 4.64e14, 1e15)
WIDTHS = (48, 64, 96, 128)
STARTS = 60  # the projected starts nearly all reach the optimum; checked in test_solve


@pytest.fixture(scope="module")
def grid(make_grid):
    """Runs of r = 1, 2, 4 (four budgets, four widths) from a law, noise with a seed of its own."""

    def build(law, noise=0.0, seed=0, rs=(1, 2, 4), budgets=BUDGETS):
        frame = make_grid(law, budgets=budgets, widths=WIDTHS, rs=rs)
        frame["val_loss"] += noise * np.random.default_rng(seed).normal(size=len(frame))
        frame["effective_depth"] = 20
        frame["vocab_size"] = 32064
        return frame

    return build


def shifted(law, delta):
    return JointLaw(**{**vars(law), "phi": law.phi + delta})


def looped(frame):
    return frame[frame["recurrences"] > 1].reset_index(drop=True)


def compared(baseline, variant, split="text", **options):
    base = RunTable.of(baseline, split=split)
    return compare(base, variant_table(variant, base), **{"n_starts": STARTS, **options})


# --- recovery and intervals ---------------------------------------------------------------------


@pytest.mark.parametrize("delta", [-0.25, -0.05, 0.3])
def test_shift_is_recovered_from_runs_without_noise(grid, known_law, delta):
    found = compared(grid(known_law), looped(grid(shifted(known_law, delta))), resamples=20)
    # abs 1e-5: the objective is 1e-20 here, where its minimum is flat to rounding
    assert found.delta_phi == pytest.approx(delta, abs=1e-5)
    assert found.delta_phi_ci == pytest.approx((delta, delta), abs=1e-4)
    assert found.p_positive == float(delta > 0)
    more = "more" if delta > 0 else "less"
    assert found.verdict.startswith(f"A recurrence is worth {more} in the variant")


def test_interval_of_noisy_runs_covers_a_clear_shift_and_excludes_zero(grid, known_law):
    noisy = compared(
        grid(known_law, 0.003, seed=1), looped(grid(shifted(known_law, 0.3), 0.003, seed=2))
    )
    low, high = noisy.delta_phi_ci
    assert 0 < low < 0.3 < high
    assert noisy.p_positive == 1.0
    assert noisy.n_resamples == 200


@pytest.mark.parametrize("delta", [0.0, 0.02])
def test_delta_reaches_every_fit(grid, known_law, delta):
    tables = grid(known_law, 0.003, seed=1), grid(shifted(known_law, 0.1), 0.003, seed=2)
    found = compared(*tables, delta=delta, resamples=20)
    baseline, variant = (fit_joint(one, delta=delta, n_starts=STARTS).law for one in tables)
    assert found.phi_variant - found.phi_baseline == pytest.approx(variant.phi - baseline.phi)
    drawn = bootstrap(fit_joint(tables[0], delta=delta, n_starts=STARTS), resamples=20)
    assert found.phi_baseline_ci == pytest.approx((drawn.low, drawn.high), abs=1e-6)
    assert ("least absolute" if delta == 0 else "Huber(0.02)") in render(found)


def test_cannot_tell_where_the_noise_is_larger_than_the_shift(grid, known_law):
    noisy = compared(
        grid(known_law, 0.01, seed=5), looped(grid(shifted(known_law, 0.01), 0.01, seed=6))
    )
    assert noisy.delta_phi_ci[0] < 0 < noisy.delta_phi_ci[1]
    assert noisy.verdict.startswith("Cannot tell whether a recurrence is worth more or less")
    assert "covers 0" in noisy.verdict


def test_the_same_table_twice_differs_by_exactly_nothing(paper):
    found = compared(paper, paper.sample(frac=1, random_state=0), split="regression")
    assert (found.delta_phi, found.delta_phi_ci, found.p_positive) == (0.0, (0.0, 0.0), 0.0)
    assert set(found.draws) == {0.0}
    assert found.verdict.startswith("Cannot tell: no difference")
    assert all(effect.loss_change.value == 0.0 for effect in found.meaning.effects)


def test_paired_draws_of_common_noise_are_narrower_than_independent_ones(grid, known_law):
    """Noise that both tables share in every cell cancels in the difference of paired draws."""
    noise = 0.01 * np.random.default_rng(5).normal(size=len(grid(known_law)))
    baseline, variant = grid(known_law), grid(shifted(known_law, 0.1))
    baseline["val_loss"] += noise
    variant["val_loss"] += noise
    paired = compared(baseline, variant)
    unequal = variant[~((variant["budget_flops"] == 1e15) & (variant["recurrences"] == 1))]
    apart = compared(baseline, unequal)
    assert paired.paired
    assert paired.pairing.startswith("paired")
    assert not apart.paired
    assert apart.pairing.startswith("independent")
    widths = [one.delta_phi_ci[1] - one.delta_phi_ci[0] for one in (paired, apart)]
    print("RATIO", widths[0] / widths[1])
    assert widths[0] < 0.6 * widths[1]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5])
def test_interval_of_the_shift_covers_the_truth_in_90_to_98_percent(grid, known_law, shared):
    """Independent noise, and half of its variance shared within a (budget, r) cell; r = 1 reused."""
    truth, sigma, sets = 0.15, 0.008, 200
    baseline, variant = grid(known_law), looped(grid(shifted(known_law, truth)))
    covered = signs = 0
    for k in range(sets):
        generator = np.random.default_rng([11, k])
        noisy = []
        for frame in (baseline, variant):
            cell = frame.groupby(["budget_flops", "recurrences"]).ngroup().to_numpy()
            common = generator.normal(size=cell.max() + 1)[cell]
            own = generator.normal(size=len(frame))
            noise = sigma * (np.sqrt(shared) * common + np.sqrt(1 - shared) * own)
            noisy.append(frame.assign(val_loss=frame["val_loss"] + noise))
        found = compared(*noisy, seed=k, n_starts=20)
        low, high = found.delta_phi_ci
        covered += low <= truth <= high
        signs += found.p_positive > 0.5
    assert 0.90 <= covered / sets <= 0.98
    assert signs / sets > 0.95


# --- what it means ------------------------------------------------------------------------------


def test_parts_of_the_loss_change_add_up_and_agree_with_the_frontier(grid, known_law):
    """Same FLOPs per token: all of it is capacity. Optima against the one-law minimiser."""
    baseline, variant = grid(known_law), looped(grid(shifted(known_law, 0.3)))
    found = compared(baseline, variant, resamples=20)
    (one,) = (a for a in architectures(RunTable.of(baseline).runs)[0] if a.r == 4)
    for effect in found.meaning.effects:
        parts = effect.capacity_part.value + effect.token_part.value
        assert effect.loss_change.value == pytest.approx(parts, abs=1e-12)
        assert effect.token_part.value == pytest.approx(0.0, abs=1e-12)
        assert effect.loss_change.value < 0
        assert effect.width.value < 1  # a gain of capacity narrows the optimum
        assert effect.equal_loss_budget.value < 1
        if effect.r == 4:
            before = optimum(known_law, one, effect.budget_flops)
            after = optimum(shifted(known_law, 0.3), one, effect.budget_flops)
            # abs 1e-6: both laws are refitted, known to 1e-5 in φ
            assert effect.loss_change.value == pytest.approx(after.loss - before.loss, abs=1e-5)
            ratio = after.hidden_size / before.hidden_size
            assert effect.width.value == pytest.approx(ratio, rel=1e-4)
    assert found.verdict.count("it is a gain of capacity") == 1


def test_variant_that_only_saves_flops_gains_by_tokens_alone(grid, known_law):
    """A quarter fewer FLOPs per token, same law: lower loss at equal budget, none at equal tokens."""
    variant = looped(grid(known_law))
    variant["forward_flops_per_token"] = variant["train_flops_per_token"] / 3
    variant["train_flops_per_token"] *= 0.75
    variant["tokens"] /= 0.75
    n_once, n_rec, r, tokens = (
        variant[name].to_numpy(dtype=float) for name in ("n_once", "n_rec", "recurrences", "tokens")
    )
    variant["val_loss"] = known_law.loss(n_once, n_rec, r, tokens)
    found = compared(grid(known_law), variant, resamples=20)
    assert found.delta_phi == pytest.approx(0.0, abs=1e-5)
    for effect in found.meaning.effects:
        assert effect.loss_change.value < -1e-3
        assert effect.capacity_part.value == pytest.approx(0.0, abs=1e-6)
        assert effect.equal_tokens.value == pytest.approx(0.0, abs=1e-6)
        # The cheaper model reaches the same loss with the same model and tokens.
        assert effect.equal_loss_budget.value == pytest.approx(0.75, rel=1e-5)
        assert effect.equal_loss_inference_flops.value == pytest.approx(1.0, rel=1e-4)
        assert effect.equal_loss_kv_bytes.value == pytest.approx(1.0, rel=1e-4)
    for row in found.observed:
        assert row.tokens_ratio == pytest.approx(1 / 0.75)
        assert row.n_lower == row.n_settings == 16


def test_capacity_is_the_change_of_effective_parameters(grid, known_law):
    found = compared(grid(known_law), looped(grid(shifted(known_law, 0.2))), resamples=20)
    for row in found.meaning.capacity:
        once, rec = 48 * row.hidden_size**2, 192 / row.r * row.hidden_size**2
        before, after = (once + row.r**phi * rec for phi in (0.6, 0.8))
        # rel 1e-4: φ is recovered to 1e-5
        assert row.change.value == pytest.approx(after - before, rel=1e-4)
        assert row.ratio.value == pytest.approx(after / before, rel=1e-4)
        assert row.n_baseline == pytest.approx(once + rec, rel=1e-9)


def test_without_widths_the_shift_comes_with_the_reason_why_its_meaning_is_missing(grid, known_law):
    frames = [grid(known_law), looped(grid(shifted(known_law, 0.3)))]
    found = compared(*(frame.drop(columns="hidden_size") for frame in frames), resamples=20)
    assert found.delta_phi == pytest.approx(0.3, abs=1e-5)
    assert found.meaning.effects == ()
    assert any("hidden_size is missing" in text for text in found.meaning.unavailable)
    assert "cannot be said" in found.verdict


# --- tables that do not match -------------------------------------------------------------------


def test_other_r_are_drawn_independently_and_checked_on_the_shared_cells(grid, known_law):
    baseline = grid(known_law, rs=(1, 2, 4, 8))
    variant = looped(grid(shifted(known_law, 0.2), rs=(4, 8)))
    found = compared(baseline, variant, resamples=40)
    assert not found.paired
    assert "although they share their r = 1 runs" in found.pairing
    assert found.shared_cells.paired
    assert found.shared_cells.delta_phi == pytest.approx(0.2, abs=1e-5)
    assert {effect.r for effect in found.meaning.effects} == {4, 8}
    assert any("compared at equal r alone" in text for text in found.meaning.unavailable)


def test_sign_that_the_shared_cells_do_not_confirm_is_not_told(grid, known_law):
    """The variant equals the baseline at r = 2; only its r = 4, which the baseline lacks, is better."""
    better, same = grid(shifted(known_law, 0.3)), grid(known_law)
    variant = pd.concat([same[same["recurrences"] == 2], better[better["recurrences"] == 4]])
    baseline = grid(known_law, 0.002, seed=1, rs=(1, 2))
    found = compared(baseline, variant.reset_index(drop=True))
    assert found.delta_phi_ci[0] > 0
    assert found.shared_cells.delta_phi_ci[0] < 0 < found.shared_cells.delta_phi_ci[1]
    assert found.verdict.startswith("Cannot tell")
    assert "does not confirm the sign" in found.verdict


def test_tables_without_a_common_looped_r_say_that_only_the_laws_form_links_them(grid, known_law):
    found = compared(grid(known_law, rs=(1, 2)), looped(grid(known_law, rs=(4,))), resamples=20)
    assert found.shared_cells is None
    assert any("share no looped r" in note for note in found.notes)
    assert any("rests on one looped r, 4" in note for note in found.notes)


def test_variant_with_one_looped_r_is_compared_and_the_weakness_named(grid, known_law):
    variant = looped(grid(shifted(known_law, 0.2), rs=(4,)))
    found = compared(grid(known_law), variant, split="regression", resamples=20)
    assert found.delta_phi == pytest.approx(0.2, abs=1e-4)
    assert any("φ of the variant rests on one looped r, 4" in note for note in found.notes)


def test_one_looped_r_without_r1_anywhere_is_refused(grid, known_law):
    with pytest.raises(ValueError, match="at least two different r"):
        compared(looped(grid(known_law)), looped(grid(known_law, rs=(4,))))


def test_resamples_below_two_are_refused(grid, known_law):
    with pytest.raises(ValueError, match="resamples is 1"):
        compared(grid(known_law), grid(known_law), resamples=1)


# --- output -------------------------------------------------------------------------------------


def test_json_starts_with_the_agreed_keys_and_the_result_comes_back_from_its_own(grid, known_law):
    found = compared(grid(known_law), looped(grid(shifted(known_law, 0.2))), resamples=20)
    value = json.loads(json.dumps(as_json(found), allow_nan=False))
    agreed = [
        "delta_phi",
        "delta_phi_ci",
        "phi_baseline",
        "phi_variant",
        "p_positive",
        "verdict",
    ]
    assert list(value)[: len(agreed)] == agreed
    assert value["delta_phi"] == found.delta_phi
    assert value["delta_phi_ci"] == list(found.delta_phi_ci)
    again = Comparison.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.meaning.effects == found.meaning.effects


def test_report_holds_the_numbers_of_the_json(grid, known_law):
    found = compared(grid(known_law), looped(grid(shifted(known_law, 0.2), rs=(2,))), resamples=20)
    text = render(found)
    value = as_json(found)
    assert f"Δφ = {value['delta_phi']:+.4f}" in text
    assert f"{value['law_variant']['alpha']:.4f}" in text
    assert " ".join(value["verdict"].split()) in " ".join(text.split())
    for effect in value["meaning"]["effects"]:
        assert f"{effect['loss_change']['value']:+.4f}" in text
    assert "cells that both tables hold" in text


def test_same_seed_gives_the_same_numbers_and_another_seed_other_draws(grid, known_law):
    tables = grid(known_law, 0.003), looped(grid(shifted(known_law, 0.2), 0.003, seed=9))
    first, again, other = (compared(*tables, resamples=20, seed=seed) for seed in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert first.draws != other.draws
