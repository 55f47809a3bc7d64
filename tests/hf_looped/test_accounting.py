"""Counts against the module itself, PyTorch's own FLOP counter, and the paper's published numbers."""

import csv
import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import (
    executed_parameters,
    forward_flops_per_token,
    kv_bytes_per_token,
    parameters,
    train_flops_per_token,
    weight_bytes,
)

PAPER = Path(__file__).parents[1] / "fixtures" / "paper_runs_baseline.csv"
REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
BATCH = 2**18  # tokens
GRID = {  # widths of the paper's grid, d = 64·s, by budget in FLOPs (Table 6)
    4.64e17: (6, 8, 10, 12),
    1e18: (6, 8, 10, 12, 14),
    2.15e18: (8, 10, 12, 14, 16),
    4.64e18: (10, 12, 14, 16, 18, 20),
    1e19: (12, 16, 18, 20, 24),
    2.15e19: (18, 24, 28, 34),
}


def paper_config(s, r, **fields):
    return LoopedConfig.iso_depth(64 * s, r, vocab_size=32064, head_dim=64, **fields)


configs = st.builds(
    lambda heads, groups, head, injection, layers, r, lanes, vocab, tied, mlp, options, rank: (
        LoopedConfig(
            vocab_size=vocab,
            hidden_size=8 * heads,
            intermediate_size=mlp,
            gated_mlp=options[0],
            qk_norm=options[1],
            embedding_norm=options[2],
            recurrent_norm=options[3],
            time_conditioning=options[4],
            exit_gate=options[5],
            adapter_rank=rank,
            num_attention_heads=heads * groups,
            num_key_value_heads=heads,
            head_dim=head,
            num_prelude_layers=layers[0],
            num_recurrent_layers=layers[1],
            num_coda_layers=layers[2],
            num_recurrences=r,
            injection=injection,
            num_lanes=lanes,
            tie_word_embeddings=tied,
        )
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([4, 8, 10]),
    st.sampled_from(["linear", "additive", "passthrough", "diagonal", "hyperconnections"]),
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(8, 40),
    st.booleans(),
    st.sampled_from([None, 24]),
    st.tuples(*[st.booleans()] * 6),
    st.sampled_from([None, 3]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(config=configs)
def test_counts_sum_to_the_parameters_of_the_module(config):
    """Equal, not close: integers. Each group is counted again by the names of the module's parameters."""
    with torch.device("meta"):
        model = LoopedForCausalLM(config)
    model.tie_weights()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert ("lm_head.weight" in sizes) != config.tie_word_embeddings
    count = parameters(config)
    assert count.once + count.rec + count.norm + count.embedding == sum(sizes.values())
    assert count.total == sum(sizes.values())

    def total(*parts, where=""):
        found = {name: n for name, n in sizes.items() if any(part in name for part in parts)}
        return sum(n for name, n in found.items() if where in name)

    assert count.norm == total("norm")
    assert count.embedding == total("embed_tokens", "lm_head")
    scalars = total("injection.alpha", "injection.mixing", "injection.beta")
    assert count.injection == total("injection") - scalars <= count.rec
    assert count.once == total("prelude", "coda") - total("prelude.", "coda.", where="norm") + (
        scalars + total("adapter")
    )
    assert weight_bytes(config) == 2 * sum(sizes.values())


def counted_flops(config, length, rows=2):
    """Forward and backward FLOPs of a training step's matrix products, counted by PyTorch as they run."""
    config._attn_implementation = "eager"
    model = LoopedForCausalLM(config).train()
    x = torch.randint(config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as forward:
        loss = model(x, labels=x, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    # The time modulation's products are of weights alone: [8] → [4·D] for each layer and recurrence, forward, and
    # the weight's gradient, backward.
    modulation = 2 * 8 * 4 * config.hidden_size * config.time_conditioning
    modulation *= config.num_recurrences * config.num_recurrent_layers
    tokens = rows * length
    return forward.get_total_flops() - modulation, backward.get_total_flops() - modulation, tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"injection": "linear"},
        {"injection": "additive"},
        {"injection": "passthrough"},
        {"injection": "hyperconnections", "num_lanes": 3},
        {"injection": "linear", "num_backprop_recurrences": 2},
        {"injection": "additive", "num_backprop_recurrences": 1},
        {"injection": "linear", "state_init": "normal", "num_backprop_recurrences": 1},
        {"injection": "linear", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        {"injection": "passthrough", "num_prelude_layers": 0, "num_coda_layers": 0},
        {"gated_mlp": True, "intermediate_size": 88, "num_backprop_recurrences": 3},
        {"qk_norm": False, "embedding_norm": False, "recurrent_norm": False},
        {"residual_multiplier": 0.25},
        {"injection": "diagonal"},
        {"injection": "diagonal", "adapter_rank": 3},
        {"adapter_rank": 2, "gated_mlp": True, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"time_conditioning": True},
        {"exit_gate": True},
    ],
    ids=str,
)
def test_flops_are_those_of_the_matrix_products_that_run_plus_gains(tiny_config, fields):
    """Equal integers. The formula's terms that are no product: gains, 2·(2d) a block, β ⊗ s, 2·K·d, a ⊙ h + b ⊙ e, 4·d,
    and the four gains of a layer's modulation.
    """
    config = tiny_config(num_recurrences=4, **fields)
    length = 10
    forward, backward, tokens = counted_flops(config, length)
    exits = 4 if config.exit_gate else 1  # how often the coda runs in training
    d, r, outer = 32, 4, config.num_prelude_layers + exits * config.num_coda_layers
    recurrence = config.num_recurrent_layers * (12 if config.time_conditioning else 4) * d
    if config.injection == "diagonal":
        recurrence += 4 * d
    if config.injection == "hyperconnections":
        recurrence += 2 * config.num_lanes * d
    differentiated = config.num_backprop_recurrences or r
    elementwise_forward = outer * 4 * d + r * recurrence
    elementwise_backward = 2 * (outer * 4 * d + differentiated * recurrence)
    if not config.exit_gate:
        assert forward_flops_per_token(config, length) * tokens == (
            forward + tokens * elementwise_forward
        )
    assert train_flops_per_token(config, length) * tokens == (
        forward + backward + tokens * (elementwise_forward + elementwise_backward)
    )


def test_parameters_at_s_10_are_those_of_the_paper():
    """Non-embedding, gains included: 98.3, 59.8, 40.2, 30.3 M; the published digits are the tolerance."""
    for r, millions in {1: 98.3, 2: 59.8, 4: 40.2, 8: 30.3}.items():
        count = parameters(paper_config(10, r))
        assert round((count.once + count.rec + count.norm) / 1e6, 1) == millions


@pytest.fixture(scope="module")
def paper_runs():
    with PAPER.open() as file:
        return list(csv.DictReader(file))


def test_all_116_token_counts_flops_and_splits_of_the_paper_come_back_exactly(paper_runs):
    """steps = round(C / (F · 2^18)), appendix C: one FLOP a token off would move some of these counts."""
    assert len(paper_runs) == 116
    for run in paper_runs:
        r, s = int(run["recurrences"]), int(run["hidden_size"]) // 64
        config = paper_config(s, r)
        flops = train_flops_per_token(config, 2048)
        steps = round(float(run["budget_flops"]) / (flops * BATCH))
        count = parameters(config)
        assert {
            "tokens": steps * BATCH,
            "train_flops_per_token": flops,
            "n_once": count.once,
            "n_rec": count.rec,
            "n_injection": count.injection,
        } == {
            column: int(run[column])
            for column in ("tokens", "train_flops_per_token", "n_once", "n_rec", "n_injection")
        }, run["run_id"]


def test_heads_of_any_size_cost_the_same_at_one_width():
    """The paper's heads have 128 channels; the odd multiples of 64 in its grid don't divide by that."""
    for r in (1, 4):
        one = LoopedConfig.iso_depth(640, r, vocab_size=32064)
        assert train_flops_per_token(one, 2048) == train_flops_per_token(paper_config(10, r), 2048)
        assert parameters(one) == parameters(paper_config(10, r))


def savings():
    """Share of the training FLOPs per token that truncation to ⌈r/2⌉ saves, over the four lower budgets."""
    for budget, widths in GRID.items():
        if budget <= 4.64e18:
            for s in widths:
                for r in (2, 4, 8):
                    full = train_flops_per_token(paper_config(s, r), 2048)
                    config = paper_config(s, r, num_backprop_recurrences=-(-r // 2))
                    yield 1 - train_flops_per_token(config, 2048) / full


def test_truncation_saves_what_the_paper_saves():
    """22.6 to 25.0 % over the case study's widths, median 24 %, D_trunc / D_full = 1.315: published digits."""
    saved = list(savings())
    assert 0.2255 <= min(saved) <= 0.2265
    assert 0.2495 <= max(saved) <= 0.2505
    assert round(statistics.median(saved), 2) == 0.24
    assert statistics.median(1 / (1 - s) for s in saved) == pytest.approx(1.315, abs=0.001)


def test_truncated_flops_of_matrices_are_equation_6():
    """(2·(r − r_bwd) + 6·r_bwd)·(l_rec·n_b + n_i) + 6·(l_pre + l_coda)·n_b, at T = 0 and without gains and head."""
    d, r, k = 640, 4, 2
    n_b, n_i = 12 * d**2, 2 * d**2
    expected = (2 * (r - k) + 6 * k) * (4 * n_b + n_i) + 6 * 4 * n_b
    gains = (2 * (r - k) + 6 * k) * 4 * 2 * d + 6 * 4 * 2 * d
    config = paper_config(10, r, num_backprop_recurrences=k)
    assert train_flops_per_token(config, 0) == expected + gains + 6 * d * 32064


def test_inference_cost_is_that_of_appendix_d():
    """s = 34, 4,096 tokens of context, bfloat16; the published digits are the tolerance."""
    unlooped, looped = paper_config(34, 1), paper_config(34, 8)
    assert round(weight_bytes(unlooped) / 1e9, 2) == 2.55
    assert round(weight_bytes(looped) / 1e9, 2) == 0.98
    assert kv_bytes_per_token(unlooped) == kv_bytes_per_token(looped) == 20 * 2 * 64 * 34 * 2
    flops = forward_flops_per_token(unlooped, 4096)
    assert 1 < forward_flops_per_token(looped, 4096) / flops < 1.05
    same_size = LoopedConfig(
        vocab_size=32064,
        hidden_size=64 * 34,
        num_attention_heads=17,
        num_recurrent_layers=16,
        num_recurrences=8,
    )
    assert weight_bytes(same_size) == pytest.approx(
        weight_bytes(unlooped), rel=0.01
    )  # + n_i, 0.7 %
    assert round(same_size.num_hidden_layers / unlooped.num_hidden_layers, 1) == 6.6
    assert round(kv_bytes_per_token(same_size) / kv_bytes_per_token(unlooped), 1) == 6.6
    assert round(forward_flops_per_token(same_size, 4096) / flops, 1) == 6.4


def test_cached_bytes_are_those_of_a_real_cache(tiny_model, tokens):
    """Float32 keys and values of five tokens, summed over the slots that a forward fills."""
    model = tiny_model(num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        cache = model(tokens(rows=1, length=5), use_cache=True).cache
    held = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert held == 5 * kv_bytes_per_token(model.config, bytes_per_value=4)


@pytest.mark.parametrize("injection", ["linear", "passthrough"])
def test_executed_parameters_are_those_of_the_modules_times_their_calls(tiny_config, injection):
    config = tiny_config(num_recurrences=3, injection=injection)
    sizes = {name: p.numel() for name, p in LoopedForCausalLM(config).model.named_parameters()}

    def total(*sections):
        return sum(n for name, n in sizes.items() if name.startswith(sections))

    assert executed_parameters(config) == (
        total("prelude", "coda") + 3 * total("recurrent.", "injection")
    )


def test_flops_of_a_step_follow_its_recurrences_its_truncation_and_its_shortcut(tiny_config):
    """Against models whose config says what the step did."""
    looped = tiny_config(num_recurrences=4)
    truncated = tiny_config(num_recurrences=4, num_backprop_recurrences=2)
    for r in (1, 2, 3, 6):
        same = tiny_config(num_recurrences=r)
        assert train_flops_per_token(looped, 10, r) == train_flops_per_token(same, 10)
        assert forward_flops_per_token(looped, 10, r) == forward_flops_per_token(same, 10)
        same = tiny_config(num_recurrences=r, num_backprop_recurrences=min(r, 2))
        assert train_flops_per_token(truncated, 10, r) == train_flops_per_token(same, 10)
    elastic = tiny_config(num_recurrences=4, time_conditioning=True)
    shorter = tiny_config(num_recurrences=2, time_conditioning=True, num_prelude_layers=0)
    assert train_flops_per_token(elastic, 10, shortcut_recurrences=2) == (
        train_flops_per_token(elastic, 10) + train_flops_per_token(shorter, 10)
    )


TINY = {  # executed by the paper's reference implementation: FLOPs per token at T = 24, parameters
    "r1_unlooped": (0, 4, 0, 1, "passthrough", 357888, 57696),
    "r4_linear": (1, 2, 1, 4, "linear", 907008, 59744),
    "r4_hyperconnections": (1, 2, 1, 4, "hyperconnections", 864000, 57728),
}


@pytest.mark.parametrize("case", TINY)
def test_tiny_models_count_as_in_the_reference_implementation(case):
    prelude, recurrent, coda, r, injection, flops, total = TINY[case]
    config = LoopedConfig(
        vocab_size=128,
        hidden_size=32,
        num_attention_heads=2,
        num_prelude_layers=prelude,
        num_recurrent_layers=recurrent,
        num_coda_layers=coda,
        num_recurrences=r,
        injection=injection,
    )
    assert train_flops_per_token(config, 24) == flops
    assert parameters(config).total == total


def test_the_numbers_above_are_those_of_the_reference_files():
    if not REFERENCE.is_dir():
        pytest.skip("the reference numbers (shared/reference beside the repository) are not here")
    meta = json.loads((REFERENCE / "meta.json").read_text())
    read = {case: (m["flops_per_token"], m["params"]["total"]) for case, m in meta.items()}
    assert read == {case: numbers[-2:] for case, numbers in TINY.items()}
