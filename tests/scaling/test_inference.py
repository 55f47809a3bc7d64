"""Cost of serving at other widths against the paper's appendix D and direct counts."""

import pandas as pd
import pytest

from scaling.comparison.inference import inference_costs
from scaling.runs.table import RunTable

D = 34 * 64  # width of the paper's largest model
CONTEXT = 4096


@pytest.fixture
def costs(paper):
    found = inference_costs(RunTable.of(paper).runs, context=CONTEXT)
    return {one.r: one for one in found}


def test_weight_memory_of_the_papers_iso_depth_models_is_that_of_appendix_d(costs):
    """2.55 GB at r = 1 and 0.98 GB at r = 8, s = 34."""
    assert float(costs[1].at("weight_bytes", D)) / 1e9 == pytest.approx(2.55, abs=0.005)
    assert float(costs[8].at("weight_bytes", D)) / 1e9 == pytest.approx(0.98, abs=0.005)


def test_flops_of_the_papers_iso_depth_models_lie_within_5_percent_and_the_cache_is_equal(costs):
    flops = [float(one.at("flops", D)) for one in costs.values()]
    assert max(flops) / min(flops) < 1.05
    assert len({float(one.at("kv_bytes", D)) for one in costs.values()}) == 1


def test_iso_parameter_model_at_r8_costs_what_appendix_d_says(costs, paper):
    """16 looped layers run eight times between 2 + 2: 6.6 x layers and cache, 6.4 x FLOPs, equal weights."""
    rows = paper[paper["recurrences"] == 8].copy()
    d = rows["hidden_size"].astype(float)
    layers = 2 + 16 * 8 + 2
    rows["effective_depth"] = layers
    rows["n_rec"] = 16 * 12 * d**2 + 2 * d**2
    block = 2 * (12 * d**2 + 2 * d) + 4 * 2048 * d
    forward = layers * block + 8 * 2 * 2 * d**2 + 2 * 32064 * d
    rows["train_flops_per_token"] = 3 * forward
    (iso,) = inference_costs(RunTable.of(rows).runs, context=CONTEXT)
    ratio = {
        name: float(iso.at(name, D)) / float(costs[1].at(name, D))
        for name in ("flops", "kv_bytes", "weight_bytes")
    }
    assert ratio["kv_bytes"] == pytest.approx(6.6, abs=0.05)
    assert ratio["flops"] == pytest.approx(6.4, abs=0.05)
    assert ratio["weight_bytes"] == pytest.approx(1.0, abs=0.02)  # "about the same"


def test_columns_of_the_table_come_before_derived_values(paper):
    d = paper["hidden_size"].astype(float)
    given = paper.assign(
        forward_flops_per_token=7 * d**2, weight_bytes=5 * d**2 + d, kv_bytes_per_token=3 * d
    )
    for one in inference_costs(RunTable.of(given).runs):
        assert one.basis == ()
        # rel: least squares over exact values
        assert float(one.at("flops", 100.0)) == pytest.approx(7e4, rel=1e-9)
        assert float(one.at("weight_bytes", 100.0)) == pytest.approx(50_100, rel=1e-9)
        assert float(one.at("kv_bytes", 100.0)) == pytest.approx(300, rel=1e-9)


def test_flops_of_truncated_backpropagation_are_not_guessed(paper):
    truncated = paper.assign(backprop_recurrences=(paper["recurrences"] + 1) // 2)
    found = {one.r: one for one in inference_costs(RunTable.of(truncated).runs)}
    assert found[1].flops is not None  # one recurrence is trained through
    assert found[4].flops is None
    assert any("backpropagation is truncated" in text for text in found[4].basis)


def test_missing_columns_give_none_with_the_reason(paper):
    bare = paper.drop(columns=["vocab_size", "effective_depth", "train_flops_per_token"])
    for one in inference_costs(RunTable.of(bare).runs):
        assert (one.flops, one.weight_bytes, one.kv_bytes) == (None, None, None)
        assert len(one.basis) == 3


def test_costs_that_are_no_polynomial_in_the_width_or_have_one_width_are_left_out(paper):
    wild = paper.assign(weight_bytes=paper["hidden_size"].astype(float) ** 4)
    assert all(one.weight_bytes is None for one in inference_costs(RunTable.of(wild).runs))
    runs = RunTable.of(paper).runs
    single: pd.DataFrame = runs[runs["hidden_size"] == 640]
    assert all(one.weight_bytes is None for one in inference_costs(single))
