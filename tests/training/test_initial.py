"""Training on from a checkpoint: its weights, architecture and tokenizer are taken, its recurrences may change."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_looped import LoopedConfig
from training.config import load_config, resolve
from training.data import open_packed
from training.loop import Interrupted, train
from training.sampler import rows_of_step


@pytest.fixture(scope="module")
def pretrained(recipe, tmp_path_factory):
    """Checkpoint of a short run of r = 2, moved away from its run."""
    config = recipe("pretraining", "steps=12")
    train(config)
    folder = tmp_path_factory.mktemp("pretrained") / "checkpoint"
    shutil.copytree(config.folder / "checkpoint", folder)
    return folder


@pytest.fixture
def tune_on(recipe_fields, pretrained, tmp_path):
    """tune_on("name", "field=value", …) → a recipe of four steps without a model of its own."""

    def make(name, *overrides, init_from=pretrained):
        fields = {k: v for k, v in recipe_fields.items() if k not in ("model", "transfer")}
        fields |= {"run_id": name, "steps": 4, "out": str(tmp_path), "init_from": str(init_from)}
        return resolve(fields, ["transfer.reference_batch_tokens=128", *overrides])

    return make


def test_training_goes_on_with_the_weights_and_tokenizer_of_the_checkpoint(tune_on, pretrained):
    """The first logged loss is the checkpoint's own on the rows of step 0; float32 rounding, 1e-5."""
    config = tune_on("on")
    record = train(config)
    assert config.data.tokenizer == str(pretrained)
    assert record["init_from"] == str(pretrained) and record["status"] == "finished"
    packed = open_packed(config.data_folder)
    rows = packed.train[rows_of_step(0, 4, len(packed.train), config.seed)].astype(np.int64)
    batch = torch.tensor(rows)
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    with torch.no_grad():
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    first = json.loads((config.folder / "log.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(config.folder / "checkpoint")
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("overrides", "r", "k", "depth"),
    [
        ((), 2, None, 4),
        (("model.recurrences=3",), 3, None, 5),
        (("model.recurrences=3", "model.backprop_recurrences=half"), 3, 2, 5),
    ],
)
def test_recurrences_may_be_changed_and_the_record_counts_with_them(
    tune_on, overrides, r, k, depth
):
    config = tune_on("recurrences", "steps=1", *overrides)
    assert (config.model.recurrences, config.model.effective_depth) == (r, depth)
    record = train(config)
    assert (record["recurrences"], record["effective_depth"]) == (r, depth)
    assert record["shared_depth"] == r * record["num_recurrent_layers"]
    assert record["backprop_recurrences"] == (r if k is None else k)
    saved = LoopedConfig.from_pretrained(config.folder / "checkpoint")
    assert (saved.num_recurrences, saved.num_backprop_recurrences) == (r, k)


def test_such_a_run_resumes_bit_for_bit_and_is_read_back_without_the_checkpoint(
    tune_on, pretrained, tmp_path
):
    moved = tmp_path / "moved"
    shutil.copytree(pretrained, moved)
    straight = tune_on("straight", init_from=moved)
    stopped = tune_on("stopped", init_from=moved)
    train(straight)
    asked = []
    with pytest.raises(Interrupted):
        train(stopped, stop_asked=lambda: asked.append(1) or len(asked) == 2)
    record = train(stopped)
    names = ("log.jsonl", "checkpoint/model.safetensors")
    for name in names:
        assert (straight.folder / name).read_bytes() == (stopped.folder / name).read_bytes()
    shutil.rmtree(moved)
    read = load_config(stopped.folder / "config.yaml")
    assert read == stopped and train(read) == record


def test_what_is_no_looped_checkpoint_is_refused(tune_on, tmp_path):
    with pytest.raises(ValueError, match=r"init_from: .*nowhere.* cannot be loaded"):
        tune_on("missing", init_from=tmp_path / "nowhere")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"is a llama model.*training\.retrofit"):
        tune_on("llama", init_from=tmp_path / "llama")


@pytest.mark.parametrize(
    "field",
    [
        "model.hidden_size=32",
        "model.injection=additive",
        "model.vocab_size=512",
        "model.shared_depth=4",
    ],
)
def test_a_field_that_the_checkpoint_decides_is_refused_by_name(tune_on, field):
    name, value = field.split("=")
    with pytest.raises(
        ValueError, match=rf"{name} is '?{value}'?, but .* has .*Leave the field"
    ) as e:
        tune_on("other", field)
    assert "init_from" in str(e.value)


def test_rows_longer_than_the_positions_are_refused(tune_on):
    config = tune_on("long", "data.sequence_length=64")
    with pytest.raises(
        ValueError, match=r"sequence_length is 64, above max_position_embeddings = 32"
    ):
        train(config)


def test_more_recurrences_than_hyperconnection_tables_are_refused(recipe, tune_on):
    config = recipe("lanes", "steps=1", "model.injection=hyperconnections")
    train(config)
    further = tune_on("more", "model.recurrences=3", init_from=config.folder / "checkpoint")
    with pytest.raises(ValueError, match="num_recurrences"):
        train(further)
