"""The config: the paper's family, derived values that can't go stale, and one clear message for each bad input."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from hf_looped import LoopedConfig

REFUSED = (
    ValueError,
    StrictDataclassError,
)  # the strict dataclass wraps what its validation raises


def sections(config):
    return config.num_prelude_layers, config.num_recurrent_layers, config.num_coda_layers


@pytest.mark.parametrize(
    ("depth", "shared", "r", "expected"),
    [
        (20, 16, 1, (0, 20, 0)),
        (20, 16, 2, (2, 8, 2)),
        (20, 16, 4, (2, 4, 2)),
        (20, 16, 8, (2, 2, 2)),
        (18, 16, 1, (0, 18, 0)),
        (18, 16, 2, (1, 8, 1)),
        (18, 16, 4, (1, 4, 1)),
        (18, 16, 8, (1, 2, 1)),
        (24, 16, 1, (0, 24, 0)),
        (24, 16, 2, (4, 8, 4)),
        (24, 16, 4, (4, 4, 4)),
        (24, 16, 8, (4, 2, 4)),
    ],
)
def test_iso_depth_gives_the_layers_of_the_paper_and_equal_executed_depth(
    depth, shared, r, expected
):
    """Section 3.1 and the depth ablation: 2 + 16/r + 2, 1 + 16/r + 1, 4 + 16/r + 4; r = 1 unlooped."""
    config = LoopedConfig.iso_depth(640, r, effective_depth=depth, shared_depth=shared)
    assert sections(config) == expected
    assert config.num_recurrences == r
    assert config.num_hidden_layers == depth
    assert config.injection == ("passthrough" if r == 1 else "linear")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (5, 5, 128)
    assert config.intermediate_size == 4 * 640


def test_iso_depth_passes_other_fields_on_and_ignores_the_injection_of_an_unlooped_model():
    looped = LoopedConfig.iso_depth(
        64, 4, head_dim=16, injection="hyperconnections", num_lanes=3, vocab_size=99
    )
    assert (looped.injection, looped.num_lanes, looped.vocab_size) == ("hyperconnections", 3, 99)
    unlooped = LoopedConfig.iso_depth(64, 1, head_dim=16, injection="additive", vocab_size=99)
    assert (unlooped.injection, unlooped.vocab_size) == ("passthrough", 99)


def test_defaults_are_those_of_table_4(tiny_config):
    config = LoopedConfig()
    assert config.hidden_act == "relu2"
    assert config.rms_norm_eps == 1e-6
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config.final_logit_softcapping == 15.0
    assert not config.tie_word_embeddings
    assert config.attention_dropout == 0.0
    assert (config.qk_norm, config.embedding_norm, config.recurrent_norm) == (True, True, True)
    assert (config.gated_mlp, config.residual_multiplier) == (False, 1.0)
    assert config.initial_state == "prelude"
    assert tiny_config(injection="additive").initial_state == "zeros"


def test_executed_layers_follow_the_sections_and_r(tiny_config):
    config = tiny_config(num_prelude_layers=3, num_recurrent_layers=5, num_coda_layers=2)
    for r in (1, 2, 7):
        config.num_recurrences = r
        assert config.num_hidden_layers == 3 + 5 * r + 2
    assert config.num_unique_layers == 10


def test_saved_config_comes_back_equal_and_keeps_no_derived_value(tiny_config, tmp_path):
    config = tiny_config(
        injection="linear",
        state_init="normal",
        num_backprop_recurrences=2,
        num_key_value_heads=1,
        gated_mlp=True,
        qk_norm=False,
        residual_multiplier=0.25,
    )
    config.save_pretrained(tmp_path)
    assert "num_hidden_layers" not in json.loads((tmp_path / "config.json").read_text())
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LoopedConfig
    loaded.name_or_path = config.name_or_path  # where it was loaded from
    assert loaded.to_dict() == config.to_dict()


@pytest.mark.parametrize("r", [1, 2, 8])
def test_r_given_at_load_leaves_nothing_stale(tiny_config, tmp_path, r):
    tiny_config(num_recurrences=3).save_pretrained(tmp_path)
    loaded = LoopedConfig.from_pretrained(tmp_path, num_recurrences=r)
    assert loaded.num_recurrences == r
    assert loaded.num_hidden_layers == 1 + 2 * r + 1
    assert loaded.backprop_recurrences == r
    assert loaded.num_trained_recurrences == 3
    loaded.save_pretrained(tmp_path)
    again = LoopedConfig.from_pretrained(tmp_path)
    assert (again.num_recurrences, again.num_trained_recurrences) == (r, 3)
    assert again.num_hidden_layers == 1 + 2 * r + 1


def test_tables_keep_their_length_when_a_checkpoint_is_loaded_with_fewer_recurrences(
    tiny_model, tmp_path
):
    tiny_model(injection="hyperconnections").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, num_recurrences=2)
    assert loaded.config.num_recurrences == 2
    assert loaded.model.injection.alpha.shape == (3, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_recurrences": 0}, "num_recurrences is 0: must be at least 1"),
        ({"num_recurrences": -3}, "num_recurrences is -3: must be at least 1"),
        (
            {"num_backprop_recurrences": 0},
            r"num_backprop_recurrences is 0: must lie in 1..num_recurrences = 3, or be None",
        ),
        (
            {"num_backprop_recurrences": 4},
            r"num_backprop_recurrences is 4: must lie in 1..num_recurrences = 3, or be None",
        ),
        (
            {"hidden_size": 33},
            r"hidden_size is 33 and num_attention_heads 2: .* divisible .* give head_dim",
        ),
        ({"head_dim": 15}, "head_dim is 15: must be even"),
        (
            {"injection": "hyperconnections", "num_lanes": 1},
            "num_lanes is 1: hyperconnections need at least two lanes",
        ),
        (
            {"injection": "hyperconnections", "num_backprop_recurrences": 2},
            "num_backprop_recurrences is 2: .* would never train; use None, or a model without them",
        ),
        (
            {"injection": "passthrough", "num_backprop_recurrences": 2},
            "num_backprop_recurrences is 2: .* no gradient; use None, or injection='linear'",
        ),
        (
            {"injection": "passthrough", "state_init": "normal"},
            "state_init is normal: .* use 'prelude'",
        ),
        (
            {"injection": "hyperconnections", "state_init": "zeros"},
            "state_init is zeros: .* use 'prelude'",
        ),
        (
            {"injection": "hyperconnections", "num_trained_recurrences": 2},
            "num_recurrences is 3: .* num_trained_recurrences = 2 only",
        ),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3: must divide num_attention_heads = 2",
        ),
        ({"num_recurrent_layers": 0}, "num_recurrent_layers is 0: must be at least 1"),
        ({"num_coda_layers": -1}, "num_coda_layers is -1: must not be negative"),
        ({"vocab_size": 0}, "vocab_size is 0: must be at least 1"),
        ({"residual_multiplier": 0}, "residual_multiplier is 0: must be positive and finite"),
        ({"residual_multiplier": -1.0}, "residual_multiplier is -1.0: must be positive"),
        ({"residual_multiplier": float("inf")}, "residual_multiplier is inf: .* finite"),
        ({"residual_multiplier": float("nan")}, "residual_multiplier is nan: .* finite"),
        ({"gated_mlp": "silu"}, "gated_mlp.*expected bool, got str"),
        ({"state_seed": -1}, r"state_seed is -1: must lie in 0..2\^31 - 1"),
        (
            {"num_hidden_layers": 7},
            r"num_hidden_layers is 7, but it is derived: .* = 8\. Leave it out",
        ),
        ({"num_recurrences": 2.0}, r"num_recurrences.*expected int, got float \(value: 2.0\)"),
        ({"injection": "concat"}, r"injection.*expected one of \('linear', 'additive'.*got concat"),
    ],
)
def test_a_bad_field_is_refused_with_its_name_value_and_remedy(tiny_config, fields, message):
    with pytest.raises(REFUSED, match=r"(?s)" + message):
        tiny_config(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 640, "recurrences": 0}, "recurrences is 0: at least one"),
        ({"hidden_size": 640, "recurrences": 3}, "recurrences is 3: must divide shared_depth = 16"),
        (
            {"hidden_size": 700, "recurrences": 2},
            "hidden_size is 700: must be a multiple of head_dim = 128; nearest multiple: 640 and 768",
        ),
        (
            {"hidden_size": 640, "recurrences": 2, "shared_depth": 15},
            "shared_depth is 15: .* even rest for prelude and coda",
        ),
        (
            {"hidden_size": 640, "recurrences": 2, "effective_depth": 12},
            "shared_depth is 16: must lie in 1..effective_depth = 12",
        ),
    ],
)
def test_a_family_that_does_not_divide_is_refused_with_field_value_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoopedConfig.iso_depth(**arguments)


def test_a_width_below_the_head_size_names_the_one_multiple_that_is_near():
    with pytest.raises(ValueError) as refused:
        LoopedConfig.iso_depth(100, 2)
    assert "128 and 128" not in str(refused.value)
    assert "128" in str(refused.value)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("injection", ["passthrough", "hyperconnections"])
def test_differentiating_all_recurrences_is_no_truncation(tiny_config, injection, k):
    config = tiny_config(injection=injection, num_backprop_recurrences=k)
    assert config.backprop_recurrences == 3
