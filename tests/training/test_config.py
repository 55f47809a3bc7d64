"""Recipes: merged, validated, saved and read back; every refusal names its field."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import training
from hf_looped import LoopedConfig
from training.config import TrainingConfig, load_config, resolve, save_config

RECIPES = sorted((Path(training.__file__).parent / "recipes").glob("*.yaml"))
FINETUNE = next(path for path in RECIPES if path.stem == "finetune")
FIELDS = {"budget_flops": 1e18, "batch_tokens": 8192}  # four rows of 2,048


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("budget_flops: 1e12\nbatch_tokens: 512\ndata: {sequence_length: 64}\nseed: 3\n")
    config = load_config(path, ["model.hidden_size=256", "seed=4", "data.packages=[numpy]"])
    assert (config.budget_flops, config.batch_tokens, config.seed) == (1e12, 512, 4)
    assert (config.data.sequence_length, config.data.packages) == (64, ["numpy"])
    assert (config.model.hidden_size, config.model.recurrences) == (256, 4)
    assert config.batch_rows == 8


def test_the_defaults_are_the_values_of_the_paper():
    config = resolve({"budget_flops": 1e18})
    assert config.batch_tokens == 2**18 and config.data.sequence_length == 2048
    assert config.data.separate_documents is False and config.data.packing_buffer == 1000
    model = config.model.build(32_064, 2048)
    layers = (model.num_prelude_layers, model.num_recurrent_layers, model.num_coda_layers)
    assert layers == (2, 4, 2) and model.num_recurrences == 4 and model.head_dim == 128
    optimizer = config.optimizer
    assert (optimizer.muonh_lr, optimizer.embedding_lr, optimizer.lm_head_lr) == (0.014, 0.3, 0.004)
    assert (optimizer.norm_lr, optimizer.hyperconnection_lr) == (0.005, 0.01)
    assert (optimizer.momentum, optimizer.betas, optimizer.eps) == (0.95, [0.8, 0.95], 1e-10)
    assert optimizer.final_lr_fraction == 0.1
    transfer = config.transfer
    assert (transfer.width_exponent, transfer.batch_exponent) == (-0.5, 0.558)
    assert (transfer.tokens_exponent, transfer.reference_width) == (-0.32, 640)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("budget_flops=null", "steps=7", "run_id=mine", "model.backprop_recurrences=2"),
        ("data.corpus=text", "data.files=[a.txt, 'b c.txt']", "data.max_documents=5"),
        ("model.injection=hyperconnections", "model.num_lanes=3", "optimizer.betas=[0.7, 0.91]"),
        ("budget_flops=4.64e17", "optimizer.eps=1e-12", "model.recurrences=1"),
    ],
)
def test_a_saved_recipe_reads_back_equal(tmp_path, overrides):
    config = resolve(FIELDS, overrides)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("path", sorted({*RECIPES} - {FINETUNE}), ids=lambda path: path.stem)
def test_recipes_that_come_along_load_and_build_their_model(path):
    config = load_config(path)
    assert isinstance(config, TrainingConfig)
    model = config.model.build(config.model.vocab_size or 1024, config.data.sequence_length)
    assert model.num_hidden_layers == config.model.effective_depth


def test_the_recipe_for_training_on_takes_the_architecture_and_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="init_from: Missing mandatory value"):
        load_config(FINETUNE)
    LoopedConfig.iso_depth(64, 2, 6, 4, head_dim=16, vocab_size=512).save_pretrained(tmp_path)
    config = load_config(FINETUNE, [f"init_from={tmp_path}"])
    assert (config.model.hidden_size, config.model.recurrences) == (64, 2)
    assert (config.model.effective_depth, config.model.shared_depth) == (6, 4)
    assert config.data.tokenizer == str(tmp_path) and config.transfer.reference_recurrences == 2


def test_a_config_is_frozen():
    config = resolve(FIELDS)
    for part, name in ((config, "seed"), (config.model, "hidden_size"), (config.data, "corpus")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modl.hidden_size=3"], "modl.*Did you mean: 'model'"),
        (["model.hiden_size=3"], r"model\.hiden_size.*Did you mean: 'hidden_size'"),
        (["model.hidden_size=wide"], r"model\.hidden_size.*'wide'.*Integer"),
        (["model.hidden_size="], r"model\.hidden_size.*'None'.*int"),
        (["data.packages=numpy"], r"data\.packages.*list"),
        (["model=3"], "(?i)model.*3"),
        (["data=null"], "data: "),
        (["steps=3"], r"budget_flops is 1e\+18 and steps is 3: give exactly one"),
        (["budget_flops=null"], "budget_flops is None and steps is None: give exactly one"),
        (["budget_flops=-1"], r"budget_flops is -1\.0: it must be positive"),
        (["budget_flops=null", "steps=0"], "steps is 0: it must be at least 1"),
        (["batch_tokens=8191"], r"batch_tokens is 8191.*multiple of data\.sequence_length = 2048"),
        (["batch_tokens=0"], "batch_tokens is 0.*multiple"),
        (["micro_batch_rows=3"], "micro_batch_rows is 3: it must divide the 4 rows"),
        (["micro_batch_rows=0"], "micro_batch_rows is 0: it must divide"),
        (["precision=fp16"], "precision is 'fp16': use one of auto, fp32, bf16"),
        (["attention=flash"], "attention is 'flash': use one of .*flash_attention_2"),
        (["log_every=0"], "log_every is 0: it must be at least 1"),
        (["checkpoint_every=0"], "checkpoint_every is 0: it must be at least 1"),
        (["evaluation_rows=0"], "evaluation_rows is 0: it must be at least 1"),
        (["data.sequence_length=1"], r"data\.sequence_length is 1: it must be at least 2"),
        (["data.packing_buffer=0"], r"data\.packing_buffer is 0: it must be at least 1"),
        (["data.document_characters=0"], r"data\.document_characters is 0: it must be at least 1"),
        (["data.validation_fraction=0"], r"data\.validation_fraction is 0\.0.*between 0 and 1"),
        (["data.validation_fraction=1"], r"data\.validation_fraction is 1\.0.*between 0 and 1"),
        (["optimizer.muonh_lr=0"], r"optimizer\.muonh_lr is 0\.0: it must be positive and finite"),
        (["optimizer.norm_lr=-1"], r"optimizer\.norm_lr is -1\.0: it must be positive and finite"),
        (["optimizer.orthogonalise=fp8"], r"optimizer\.orthogonalise is 'fp8': use one of auto"),
        (["model.recurrences=0"], "recurrences is 0: at least one recurrence"),
        (["model.recurrences=-2"], "recurrences is -2: at least one recurrence"),
        (["model.recurrences=3"], "recurrences is 3: must divide shared_depth = 16"),
        (["model.backprop_recurrences=5"], r"backprop_recurrences is 5: must lie in 1\.\..* = 4"),
        (["model.backprop_recurrences=0"], r"backprop_recurrences is 0: must lie in 1\.\..* = 4"),
        (["model.backprop_recurrences=-1"], r"model\.backprop_recurrences is '-1': use 'all'"),
        (["model.backprop_recurrences=some"], r"model\.backprop_recurrences is 'some': use 'all'"),
        (["model.backprop_recurrences=²"], r"model\.backprop_recurrences is '²': use 'all'"),
        (["model.hidden_size=650"], "hidden_size is 650.*head_dim = 128.*640 and 768"),
        (["model.hidden_size=64"], "hidden_size is 64.*head_dim = 128"),
        (["model.head_dim=5"], "head_dim is 5: must be even"),
        (["model.injection=lineal"], "injection.*linear.*lineal"),
        (["model.injection=hyperconnections", "model.num_lanes=1"], "num_lanes is 1.*K >= 2"),
        (
            ["model.injection=hyperconnections", "model.backprop_recurrences=half"],
            "backprop_recurrences is 2.*hyperconnections.*would never train.*use None",
        ),
        (
            ["model.injection=passthrough", "model.backprop_recurrences=1"],
            "backprop_recurrences is 1.*passthrough.*no gradient.*injection='linear'",
        ),
            (["model.recurrences=1", "model.backprop_recurrences=5"], "backprop_recurrences is 5: must lie in 1"),
            (["sharding=fsdp1"], "sharding is 'fsdp1': use one of none, fsdp2"),
            (["report_to=mlflow"], "report_to is 'mlflow': use one of none, tensorboard, wandb, trackio"),
            (["checkpoints_kept=0"], "checkpoints_kept is 0: it must be at least 1"),
            (["samples=-1"], "samples is -1: it must be at least 0"),
            (["data.packing_shards=0"], r"data\.packing_shards is 0: it must be at least 1"),
            (["transfer.reference_depth=0"], r"transfer\.reference_depth is 0: it must be at least 1"),
            (["run_id=.."], r"folder name '\.\.'"),
            (["run_id=data"], "folder name 'data'.*data, recipes, jobs"),
            (["run_id=a/b"], "folder name 'a/b'.*no slashes"),
            (["variant=a/b"], "folder name 'a/b-.*no slashes"),
            (["optimizer.muonh_lr=nan"], r"optimizer\.muonh_lr is nan: it must be positive and finite"),
            (["optimizer.momentum=1.5"], r"optimizer\.momentum is 1\.5: it must lie in 0\.\.1"),
            (["optimizer.final_lr_fraction=-1"], r"optimizer\.final_lr_fraction is -1\.0: it must lie"),
            (["data.max_documents=-5"], r"data\.max_documents is -5: it must be at least 1"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_field_value_and_remedy(overrides, message):
    with pytest.raises(ValueError, match=message):
        resolve(FIELDS, overrides)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("seed=-1", "seed"),
        ("budget_flops=.nan", "budget_flops"),
        ("optimizer.betas=[0.9]", r"optimizer\.betas"),
        ("transfer.reference_batch_tokens=0", r"transfer\.reference_batch_tokens"),
        ("transfer.reference_width=0", r"transfer\.reference_width"),
        ("seed=5000000000", r"seed is 5000000000: .* 2\*\*32 - 1"),
        ("transfer.tokens_per_parameter=nan", r"transfer\.tokens_per_parameter is nan"),
        ("transfer.width_exponent=nan", r"transfer\.width_exponent is nan"),
        ("transfer.depth_exponent=inf", r"transfer\.depth_exponent is inf"),
        ("model.rope_theta=0", r"model\.rope_theta is 0"),
        ("model.rope_theta=nan", r"model\.rope_theta is nan"),
        ("run_id=.runs.csv.lock", "begin with a dot"),
    ],
)
def test_values_that_would_break_a_run_after_packing_are_refused_in_the_recipe(override, field):
    """Each of these passes types and rates, and fails only once the corpus has been packed."""
    with pytest.raises(ValueError, match=field):
        resolve(FIELDS, [override])


@pytest.mark.parametrize(
    "content",
    ["budget_flops: [1", "- budget_flops: 1e18\n", "budget_flops: 1e18\nbudget_flops: 2e18\n"],
    ids=["unclosed bracket", "a list", "a field twice"],
)
def test_a_file_that_is_no_mapping_of_fields_is_refused_by_name(tmp_path, content):
    """As documented: ValueError, which the command line turns into one line and exit status 2."""
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"broken\.yaml"):
        load_config(path)


def test_errors_name_the_file_they_come_from(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("budget_flops: 1e18\nsteps_: 3\n")
    with pytest.raises(ValueError, match=r"mine\.yaml: steps_: .*steps_"):
        load_config(path)


def test_a_missing_recipe_lists_those_that_come_along(tmp_path):
    with pytest.raises(ValueError) as error:
        load_config(tmp_path / "none.yaml")
    assert "none.yaml" in str(error.value)
    assert all(path.name in str(error.value) for path in RECIPES) and RECIPES


def test_an_override_without_equals_sign_is_refused():
    with pytest.raises(ValueError, match="'nothing' is not of the form field=value"):
        load_config(RECIPES[0], ["nothing"])


def test_half_is_the_upper_half_of_the_recurrences_and_nothing_for_one():
    """⌈r/2⌉ (paper, section 5.1)."""
    expected = {1: 1, 2: 1, 4: 2, 8: 4, 16: 8}
    for r, k in expected.items():
        config = resolve(FIELDS, [f"model.recurrences={r}", "model.backprop_recurrences=half"])
        assert config.model.build(64, 8).backprop_recurrences == k
    shape = ["model.recurrences=3", "model.shared_depth=18", "transfer.reference_recurrences=3"]
    three = resolve(FIELDS, [*shape, "model.backprop_recurrences=half"])
    assert three.model.build(64, 8).backprop_recurrences == 2


def test_names_set_the_runs_of_a_grid_apart():
    """Budget, r, width, seed and variant each change the name; a given run_id wins."""
    changes = [
        "budget_flops=2.15e18",
        "model.recurrences=2",
        "model.hidden_size=768",
        "seed=1",
        "variant=b",
    ]
    names = {resolve(FIELDS, [change]).name for change in changes} | {resolve(FIELDS).name}
    assert len(names) == 6
    assert resolve(FIELDS).name == "baseline-C1e18-r4-d640-seed0"
    config = resolve(FIELDS, ["run_id=mine", "out=there"])
    assert config.folder == Path("there/mine") and config.data_folder == Path("there/data")


def test_omegaconf_reads_the_saved_file_as_plain_yaml(tmp_path):
    """No Python tags: a reader without this project sees plain fields."""
    save_config(resolve(FIELDS), tmp_path / "config.yaml")
    plain = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert plain["model"]["hidden_size"] == 640 and plain["budget_flops"] == 1e18
