"""The paper's two case studies, rebuilt from their published laws on its grid.

The paper gives φ, α, β and E of either variant (table 3) but not its runs: losses here come from that
law, A and B from the unchanged r = 1 runs (which r^φ does not touch), FLOPs per token from equations
6 and 7, with noise of the size of the law's own residuals.
"""

import numpy as np
import pytest

from scaling.comparison.compare import compare
from scaling.comparison.pairing import variant_table
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw

T, BATCH = 2048, 262_144
NOISE = 0.004  # nats
TOP_BUDGET = 5e18  # the case studies use the four budgets below


def published(paper, *, alpha, beta, E, phi):
    """Law with the published exponents and E; A, B by least squares on the reused r = 1 runs."""
    rows = paper[(paper["recurrences"] == 1) & (paper["budget_flops"] < TOP_BUDGET)]
    n, tokens, loss = (rows[name].to_numpy(dtype=float) for name in ("n_rec", "tokens", "val_loss"))
    terms = np.stack([n**-alpha, tokens**-beta], axis=1)
    A, B = np.linalg.lstsq(terms, loss - E, rcond=None)[0]
    return JointLaw(E=E, A=float(A), alpha=alpha, B=float(B), beta=beta, phi=phi)


def looped_runs(paper):
    kept = (paper["recurrences"] > 1) & (paper["budget_flops"] < TOP_BUDGET)
    return paper[kept].reset_index(drop=True)


def trained(rows, baseline, law, flops):
    """Tokens that the budget pays at `flops` per token, losses from the law under the split."""
    rows = rows.assign(
        train_flops_per_token=flops,
        tokens=np.round(rows["budget_flops"] / flops / BATCH) * BATCH,
        val_loss=2.5 + 1e-6 * np.arange(len(rows)),  # until the split is known
    )
    runs = variant_table(rows, baseline).runs
    loss = law.loss(
        *(runs[name].to_numpy(dtype=float) for name in ("n_once", "n_rec", "r", "tokens"))
    )
    return rows.assign(val_loss=loss + NOISE * np.random.default_rng(1).normal(size=len(rows)))


@pytest.fixture
def baseline(paper):
    return RunTable.of(paper, split="regression")


@pytest.fixture
def truncated(paper, baseline):
    """Gradients through the last ⌈r/2⌉ recurrences only (eq. 6); the forward pass is unchanged."""
    rows = looped_runs(paper)
    d, r = rows["hidden_size"].astype(float), rows["recurrences"]
    kept = -(-r // 2)
    layers = rows["num_recurrent_layers"]
    recurrence = 2 * (layers * (12 * d**2 + 2 * d) + 2 * d**2) + 4 * T * d * layers
    full = rows["train_flops_per_token"]
    rows = rows.assign(
        backprop_recurrences=kept, forward_flops_per_token=full / 3, variant="truncated"
    )
    law = published(paper, alpha=0.255, beta=0.484, E=1.87, phi=0.380)
    return trained(rows, baseline, law, full - 2 * (r - kept) * recurrence)


@pytest.fixture
def hyperconnections(paper, baseline):
    """Two lanes in place of the linear injection (eq. 7): no 2·d², 6·r·(K² + 2K)·d FLOPs per token."""
    rows = looped_runs(paper)
    d, r = rows["hidden_size"].astype(float), rows["recurrences"]
    flops = rows["train_flops_per_token"] - 6 * r * 2 * d**2 + 6 * r * 8 * d
    rows = rows.assign(
        n_rec=rows["n_rec"] - rows["n_injection"], n_injection=0, injection="hyperconnections"
    )
    law = published(paper, alpha=0.308, beta=0.464, E=1.93, phi=0.646)
    return trained(rows, baseline, law, flops)


def test_baseline_on_the_four_lower_budgets_has_the_published_exponents(baseline, truncated):
    found = compare(baseline, variant_table(truncated, baseline), resamples=20)
    law = found.law_baseline
    # Half a unit of the last published digit; runs read off a figure (1e-4 nats).
    assert law.phi == pytest.approx(0.453, abs=0.001)
    assert law.alpha == pytest.approx(0.266, abs=0.001)
    assert law.beta == pytest.approx(0.457, abs=0.001)
    assert law.E == pytest.approx(1.85, abs=0.005)
    assert found.r2_baseline == pytest.approx(0.9959, abs=1e-4)
    assert found.n_runs_baseline == 80


def test_truncated_backpropagation_lowers_the_loss_by_tokens_while_a_recurrence_is_worth_less(
    baseline, truncated
):
    found = compare(baseline, variant_table(truncated, baseline))
    assert found.paired
    assert found.n_reused == 20
    # The planted φ is 0.380; the reused r = 1 runs are real and do not follow that law exactly.
    assert found.phi_variant == pytest.approx(0.380, abs=0.02)
    assert found.delta_phi_ci[1] < 0
    assert found.p_positive < 0.025
    assert found.verdict.startswith("A recurrence is worth less")
    # FACTS: median ratio of tokens 1.315; the loss falls in every run (paper, figure 5).
    ratios = [row.tokens_ratio for row in found.observed]
    assert np.median(ratios) == pytest.approx(1.315, abs=0.005)
    assert all(row.n_lower == row.n_settings for row in found.observed)
    for effect in found.meaning.effects:
        assert effect.loss_change.high < 0
        assert effect.token_part.high < 0
        assert effect.width.low > 1  # the optimum widens (appendix H.3) …
        assert effect.inference_flops.low > 1  # … which costs inference FLOPs at equal budget
    overall = found.meaning.overall
    assert overall["token_part"].value < 0 < overall["capacity_part"].value
    assert overall["equal_loss_inference_flops"].low > 1
    for row in found.meaning.capacity:
        assert row.ratio.high < 1


def test_truncated_backpropagation_without_r2_keeps_its_sign(baseline, truncated):
    """Paper: 0.373 without r = 2 (its residuals are not in the planted law, so not the value here)."""
    without = truncated[truncated["recurrences"] > 2].reset_index(drop=True)
    found = compare(baseline, variant_table(without, baseline))
    assert not found.paired
    assert found.shared_cells.paired
    assert found.delta_phi < 0
    assert found.shared_cells.delta_phi < 0
    # Alike cells and common r = 1 runs cancel: the paired interval is narrower.
    widths = [one.delta_phi_ci[1] - one.delta_phi_ci[0] for one in (found, found.shared_cells)]
    assert widths[1] < widths[0]


def test_hyperconnections_gain_capacity_and_make_serving_cheaper_at_equal_loss(
    baseline, hyperconnections
):
    found = compare(baseline, variant_table(hyperconnections, baseline))
    assert found.phi_variant == pytest.approx(0.646, abs=0.02)
    assert found.delta_phi_ci[0] > 0.1
    assert found.p_positive == 1.0
    assert found.verdict.startswith("A recurrence is worth more")
    overall = found.meaning.overall
    assert overall["capacity_part"].high < 0
    assert abs(overall["capacity_part"].value) > 3 * abs(overall["token_part"].value)
    assert overall["equal_loss_inference_flops"].high < 1
    assert overall["equal_loss_weight_bytes"].high < 1
    assert overall["equal_loss_kv_bytes"].high < 1
