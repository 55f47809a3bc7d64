"""HyperP's exponents, the schedule, and which parameter goes into which group."""

import warnings
from dataclasses import replace

import pytest
from torch import nn

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.modeling_looped import HyperconnectionsInjection, LoopedRMSNorm
from training.config import ModelConfig, OptimizerConfig, TransferConfig
from training.hyperp import (
    batch_factor,
    depth_factor,
    horizon_factor,
    learning_rates,
    parameter_groups,
    reference_tokens,
    schedule,
    width_factor,
)

OPTIMIZER, TRANSFER = OptimizerConfig(), TransferConfig()
BATCH = 262_144


def rates(model=None, batch=BATCH, tokens=1_000_000_000):
    return learning_rates(OPTIMIZER, TRANSFER, model or ModelConfig(), batch, tokens)


def ratios(numerator, denominator):
    return {role: numerator[role] / denominator[role] for role in denominator}


def test_at_the_reference_point_rates_are_the_base_rates_of_the_paper():
    """Table 4's values; tokens are whole, so the horizon is off its reference by up to half of 1e9."""
    for model in (ModelConfig(), ModelConfig(recurrences=1)):
        tokens = round(reference_tokens(TRANSFER, model))
        expected = {
            "matrix": 0.014,
            "embedding": 0.3,
            "lm_head": 0.004,
            "norm": 0.005,
            "scalar": 0.01,
        }
        assert rates(model, tokens=tokens) == pytest.approx(expected, rel=1e-8)


def test_doubling_the_batch_multiplies_by_2_to_the_0558_all_but_norms_and_scalars():
    factor = 2**0.558
    assert ratios(rates(batch=2 * BATCH), rates()) == pytest.approx(
        {"matrix": factor, "embedding": factor, "lm_head": factor, "norm": 1, "scalar": 1},
        rel=1e-12,
    )


def test_doubling_the_width_divides_by_the_root_of_2_all_but_matrices():
    factor = 2**-0.5
    assert ratios(rates(ModelConfig(hidden_size=1280)), rates()) == pytest.approx(
        {"matrix": 1, "embedding": factor, "lm_head": factor, "norm": factor, "scalar": factor},
        rel=1e-12,
    )


def test_doubling_the_tokens_multiplies_matrices_alone_by_2_to_the_minus_032():
    assert ratios(rates(tokens=2_000_000_000), rates()) == pytest.approx(
        {"matrix": 2**-0.32, "embedding": 1, "lm_head": 1, "norm": 1, "scalar": 1}, rel=1e-12
    )


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, 0.558])
def test_each_factor_is_1_at_its_reference_and_a_power_of_the_ratio_elsewhere(exponent):
    """(ratio)^exponent with the recipe's exponent: a doubling multiplies by 2^exponent, a halving divides."""
    transfer = replace(
        TRANSFER,
        width_exponent=exponent,
        batch_exponent=exponent,
        tokens_exponent=exponent,
        depth_exponent=exponent,
    )
    model = ModelConfig(recurrences=1)
    horizon = int(reference_tokens(transfer, model))  # whole, but for half a token of 1e9
    for factor, reference in (
        (lambda value: width_factor(transfer, value), 640),
        (lambda value: batch_factor(transfer, value), BATCH),
        (lambda value: horizon_factor(transfer, model, value), horizon),
        (lambda value: depth_factor(transfer, value), 20),
    ):
        assert factor(reference) == pytest.approx(1, rel=1e-8)
        assert factor(2 * reference) == pytest.approx(2**exponent, rel=1e-8)
        assert factor(reference // 2) == pytest.approx(2**-exponent, rel=1e-8)


def test_depth_moves_matrices_alone_and_only_where_the_recipe_says_so():
    """HyperP's 1/√L (arXiv:2603.28743, section 3.3): 40 layers for 20 divide by √2; the paper's recipe: no rule."""
    deep = ModelConfig(effective_depth=40, shared_depth=32)
    on = replace(TRANSFER, depth_exponent=-0.5)
    tokens = 1_000_000_000
    off = learning_rates(OPTIMIZER, TRANSFER, deep, BATCH, tokens)
    found = ratios(learning_rates(OPTIMIZER, on, deep, BATCH, tokens), off)
    assert found == pytest.approx(
        {"matrix": 2**-0.5, "embedding": 1, "lm_head": 1, "norm": 1, "scalar": 1}, rel=1e-12
    )
    # Executed layers count, not stored ones: r does not change them here.
    for r in (1, 2, 8):
        model = ModelConfig(recurrences=r)
        assert learning_rates(OPTIMIZER, on, model, BATCH, tokens) == rates(model, tokens=tokens)


def test_the_residual_multiplier_is_off_unless_the_recipe_asks_for_it():
    """1/√(2L) for L executed layers (arXiv:2603.28743, section 3.3), whatever r is; the paper's recipe: none."""
    for r in (1, 4):
        model = ModelConfig(recurrences=r)
        assert model.build(64, 8).residual_multiplier == 1.0
        scaled = replace(model, scale_residual=True).build(64, 8)
        assert scaled.residual_multiplier == pytest.approx(40**-0.5, rel=1e-12)


@pytest.mark.parametrize(("r", "published"), [(1, 0.983e9), (4, 1.016e9), (8, 1.016e9)])
def test_reference_tokens_are_those_of_the_paper(r, published):
    """Looped models share the reference with r = 4; published to four digits."""
    found = reference_tokens(TRANSFER, ModelConfig(recurrences=r, hidden_size=384))
    assert found == pytest.approx(published, rel=1e-3)


def test_reference_tokens_follow_the_recipe_and_not_the_width_of_the_run():
    model = ModelConfig()
    twice = replace(TRANSFER, tokens_per_parameter=20.0)
    assert reference_tokens(twice, model) == 2 * reference_tokens(TRANSFER, model)
    wide = ModelConfig(hidden_size=1280)
    assert reference_tokens(TRANSFER, wide) == reference_tokens(TRANSFER, model)
    # 20·(12·d² + 2·d) parameters, counted by hand.
    nano = replace(TRANSFER, reference_width=64)
    assert reference_tokens(nano, ModelConfig(recurrences=1, head_dim=16)) == 10 * 20 * (
        12 * 64**2 + 2 * 64
    )


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_reference_tokens_count_grouped_heads_and_gated_mlps(r, gated):
    """By hand: q, o d², k, v a quarter of that, two or three d×3d matrices, two gains; injection 2d² r_ref times."""
    fields = {"num_key_value_heads": 2, "intermediate_size": 3 * 256}
    model = ModelConfig(hidden_size=256, head_dim=32, recurrences=r, **fields)
    architecture = LoopedConfig.from_dict(model.build(64, 8).to_dict(), gated_mlp=gated)
    d = 640
    block = 2 * d**2 + 2 * d**2 // 4 + (3 if gated else 2) * 3 * d**2 + 2 * d
    executed = 20 * block + (0 if r == 1 else 4 * 2 * d**2)
    assert reference_tokens(TRANSFER, architecture) == pytest.approx(10 * executed, rel=1e-12)
    if not gated:
        assert reference_tokens(TRANSFER, model) == reference_tokens(TRANSFER, architecture)


def test_a_share_of_heads_that_the_reference_width_cannot_have_still_counts():
    """Three heads of key-value for nine, at a reference of 128 channels, four heads: a third of d² all the same."""
    model = ModelConfig(hidden_size=288, head_dim=32, num_key_value_heads=3, recurrences=1)
    transfer, d = replace(TRANSFER, reference_width=128), 128
    block = 2 * d**2 + 2 * d**2 / 3 + 8 * d**2 + 2 * d
    assert reference_tokens(transfer, model) == pytest.approx(10 * 20 * block, rel=1e-12)


def test_recurrences_that_do_not_divide_the_shared_layers_leave_the_sections_as_they_are():
    """A loaded model of 1 + 3·1 + 1 layers against a reference with r = 4: its injection counts three times."""
    model = LoopedConfig(
        hidden_size=640, num_attention_heads=5, num_prelude_layers=1, num_coda_layers=1,
        num_recurrent_layers=1, num_recurrences=3,
    )  # fmt: skip
    d = 640
    executed = 5 * (12 * d**2 + 2 * d) + 3 * 2 * d**2
    assert reference_tokens(TRANSFER, model) == 10 * executed


@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough", "hyperconnections"])
def test_rates_of_a_recipe_are_those_of_its_architecture(injection):
    """A run that starts from a checkpoint has no other description."""
    for r in (1, 2, 8):
        model = ModelConfig(hidden_size=384, recurrences=r, injection=injection)
        architecture = model.build(32064, 2048)
        assert rates(model) == learning_rates(
            OPTIMIZER, TRANSFER, architecture, BATCH, 1_000_000_000
        )


@pytest.mark.parametrize("batch", [BATCH // 16, BATCH * 16, 1024])
def test_a_batch_more_than_8_times_away_from_the_reference_warns(batch):
    with pytest.warns(UserWarning, match=f"batch_tokens is {batch:,}.*262,144.*Tune base rates"):
        rates(batch=batch)


@pytest.mark.parametrize("batch", [BATCH // 8, BATCH, BATCH * 8])
def test_a_batch_within_8_times_of_the_reference_does_not_warn(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates(batch=batch)


def test_the_schedule_is_linear_from_1_to_a_tenth_and_depends_on_nothing_else():
    """Closed form 1 − 0.9·k/N; asked in any order it says the same."""
    steps = 37
    expected = {k: 1 - 0.9 * k / steps for k in range(steps)}
    found = {k: schedule(k, steps, 0.1) for k in reversed(range(steps))}
    assert found == pytest.approx(expected, rel=1e-12)
    assert schedule(0, steps, 0.1) == 1.0
    assert schedule(steps, steps, 0.1) == pytest.approx(0.1, rel=1e-12)
    assert schedule(0, 1, 0.1) == 1.0  # a run of a single step takes it at the peak


def role_by_module(model):
    """Role of each parameter by the class of the module that owns it."""
    roles = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                roles[id(parameter)] = "embedding"
            elif name == "lm_head":
                roles.setdefault(id(parameter), "lm_head")  # a tied one is the embedding
            elif isinstance(module, nn.Linear):
                roles[id(parameter)] = "matrix"
            elif isinstance(module, LoopedRMSNorm):
                roles[id(parameter)] = "norm"
            elif isinstance(module, HyperconnectionsInjection):
                roles[id(parameter)] = "scalar"
    return roles


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("injection", "r"),
    [("linear", 2), ("additive", 2), ("passthrough", 2), ("hyperconnections", 2), ("linear", 1)],
)
def test_every_parameter_lands_in_one_group_by_its_role(injection, r, tied):
    config = ModelConfig(
        hidden_size=16, head_dim=8, recurrences=r, effective_depth=4, shared_depth=2,
        injection=injection, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LoopedForCausalLM(config.build(64, 8))
    wanted = {"matrix": 1.0, "embedding": 2.0, "lm_head": 3.0, "norm": 4.0, "scalar": 5.0}
    groups = parameter_groups(
        model, wanted, replace(OPTIMIZER, momentum=0.9, betas=[0.7, 0.9], eps=1e-8)
    )
    found = [(id(p), group["role"]) for group in groups for p in group["params"]]
    assert len(found) == len({parameter for parameter, _ in found})
    assert dict(found) == role_by_module(model)
    assert len(found) == len(list(model.parameters()))
    for group in groups:
        assert group["params"]
        assert group["algorithm"] == ("muonh" if group["role"] == "matrix" else "adamw")
        assert group["lr"] == group["peak_lr"] == wanted[group["role"]]
        assert (group["momentum"], group["betas"], group["eps"]) == (0.9, (0.7, 0.9), 1e-8)
    roles = {role for _, role in found}
    assert ("scalar" in roles) == (injection == "hyperconnections")
    assert ("lm_head" in roles) == (not tied)


def test_a_parameter_without_known_role_is_refused_by_name():
    model = LoopedForCausalLM(
        ModelConfig(hidden_size=16, head_dim=8, effective_depth=4, shared_depth=4).build(64, 8)
    )
    model.extra = nn.Linear(2, 3, bias=False)
    with pytest.raises(ValueError, match=r"extra\.weight, shape \(3, 2\): no learning-rate role"):
        parameter_groups(model, rates(), OPTIMIZER)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (16, 1), (1, 1)])
def test_a_projection_of_one_row_or_column_goes_to_adamw_and_says_so(rows, columns):
    """Orthogonalised, a vector is only normalised, and its shards would be empty."""
    model = LoopedForCausalLM(
        ModelConfig(hidden_size=16, head_dim=8, effective_depth=4, shared_depth=4).build(64, 8)
    )
    model.gate_proj = nn.Linear(columns, rows, bias=False)
    wanted = {"matrix": 1.0, "embedding": 2.0, "lm_head": 3.0, "norm": 4.0, "scalar": 5.0}
    with pytest.warns(UserWarning, match=r"gate_proj\.weight, shape .* is a vector.*AdamW"):
        groups = parameter_groups(model, wanted, OPTIMIZER)
    (group,) = [g for g in groups if any(p is model.gate_proj.weight for p in g["params"])]
    assert (group["algorithm"], group["lr"]) == ("adamw", 5.0)
    assert all(min(p.shape) > 1 for g in groups if g["algorithm"] == "muonh" for p in g["params"])
