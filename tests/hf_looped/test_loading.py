"""Where checkpoints come from and go to: meta device, shards, devices and disk, precision, another vocabulary."""

import json

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors import safe_open

from hf_looped import LoopedForCausalLM, LoopedModel
from hf_looped.accounting import parameters
from hf_looped.modeling_looped import LoopedLMHead

INJECTIONS = ["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
each_injection = pytest.mark.parametrize("injection", INJECTIONS)
each_tying = pytest.mark.parametrize("tied", [False, True])


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def assert_equal_weights(model, expected):
    weights, wanted = model.state_dict(), expected.state_dict()
    assert weights.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(weights[name], wanted[name]), name


def stored(folder):
    """Names of the tensors in each of the folder's safetensors files."""
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names[path.name] = set(file.keys())
    return names


# Meta device


@each_injection
@pytest.mark.parametrize("training", [False, True])
def test_a_model_on_the_meta_device_has_all_weights_and_runs_by_shape(
    tiny_config, tokens, injection, training
):
    """To plan a model that fits nowhere here. The count is that of accounting.py, from the config alone."""
    config = tiny_config(injection=injection)
    with torch.device("meta"):
        model = LoopedForCausalLM(config).train(training)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == parameters(config).total
    ids = tokens().to("meta")
    assert model(ids).logits.shape == (2, 12, 64)
    assert model(ids, labels=ids).loss.shape == ()


@each_tying
def test_empty_weights_are_filled_from_shards(tiny_model, tokens, tmp_path, tied):
    """Accelerate's way around from_pretrained: parameters on meta, filled file by file."""
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(stored(tmp_path)) > 1
    with init_empty_weights():
        empty = LoopedForCausalLM(model.config)
    empty.tie_weights()
    filled = load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}).eval()
    assert torch.equal(logits(filled, tokens()), logits(model, tokens()))


# Shards, devices, disk


@each_injection
@each_tying
def test_every_tensor_comes_back_from_shards(tiny_model, tokens, tmp_path, injection, tied):
    """Each name lies in one file and in the index; a tied head is stored once, as the embedding."""
    model = tiny_model(injection=injection, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = stored(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [name for held in shards.values() for name in held]
    assert len(shards) > 5 and len(names) == len(set(names))
    assert index["weight_map"] == {name: file for file, held in shards.items() for name in held}
    assert set(names) == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in names) != tied
    for where in ({}, {"device_map": "cpu"}, {"device_map": "auto"}):
        loaded = LoopedForCausalLM.from_pretrained(tmp_path, **where)
        assert_equal_weights(loaded, model)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("section", ["model.recurrent", "lm_head"])
def test_weights_kept_on_disk_are_read_whenever_they_are_used(
    tiny_model, tokens, tmp_path, section
):
    """The shared block in every recurrence, the head for logits and for the loss without them, and while generating."""
    model, ids = tiny_model(), tokens()
    model.save_pretrained(tmp_path)
    parts = [f"model.{name}" for name, _ in model.model.named_children()] + ["lm_head"]
    places = {part: "disk" if part == section else "cpu" for part in parts}
    loaded = LoopedForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    kept = {name for name, p in loaded.named_parameters() if p.device.type == "meta"}
    assert kept == {name for name, _ in model.named_parameters() if name.startswith(f"{section}.")}
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    with torch.no_grad():
        for skip in (False, True):
            losses = [m(ids, labels=ids, skip_logits=skip).loss for m in (loaded, model)]
            assert torch.equal(*losses)
    new = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "num_recurrences": 2}
    assert torch.equal(loaded.generate(ids, **new), model.generate(ids, **new))


def test_the_model_without_head_is_loaded_from_either_checkpoint(tiny_model, tokens, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "with-head")
    model.model.save_pretrained(tmp_path / "without")
    for folder in ("with-head", "without"):
        assert_equal_weights(LoopedModel.from_pretrained(tmp_path / folder), model.model)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        LoopedForCausalLM.from_pretrained(tmp_path / "without")


# Precision


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_in_the_precision_they_were_saved_in_or_in_the_one_asked_for(
    tiny_model, tokens, tmp_path, saved
):
    """The default is what the checkpoint says, as `auto`. Rounding to bfloat16 is torch's own."""
    model = tiny_model().to(saved)
    model.save_pretrained(tmp_path)
    for asked in ({}, {"dtype": "auto"}, {"dtype": saved}):
        loaded = LoopedForCausalLM.from_pretrained(tmp_path, **asked)
        assert loaded.dtype == saved == loaded.config.dtype
        assert_equal_weights(loaded, model)
    for other in (torch.float32, torch.bfloat16):
        loaded = LoopedForCausalLM.from_pretrained(tmp_path, dtype=other)
        assert {p.dtype for p in loaded.parameters()} == {other}
        assert_equal_weights(loaded, model.to(other))
        assert logits(loaded, tokens()).dtype == torch.float32


# Another vocabulary


@each_tying
@pytest.mark.parametrize("size", [40, 100])
def test_a_resized_vocabulary_keeps_the_old_rows_and_survives_saving(
    tiny_model, tokens, tmp_path, tied, size
):
    """Logits of tokens that stay are those from before; the head stays of its class, so it can skip logits."""
    model, ids = tiny_model(tie_word_embeddings=tied), tokens() % 40
    before, kept = logits(model, ids), min(size, 64)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == model.lm_head.out_features == size
    assert model.get_input_embeddings().num_embeddings == size
    assert torch.equal(model.get_input_embeddings().weight[:kept], old[:kept])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert type(model.lm_head) is LoopedLMHead and model.lm_head.weight.requires_grad
    after = logits(model, ids)
    assert after.shape == (2, 12, size)
    # a product with another number of columns may sum in another order
    torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=0, atol=1e-5)

    ids[0, 0] = size - 1
    model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert_equal_weights(loaded, model)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_a_vocabulary_is_rounded_up_to_a_multiple(tiny_model, tokens):
    model = tiny_model()
    model.resize_token_embeddings(70, pad_to_multiple_of=16)
    assert model.config.vocab_size == 80
    assert logits(model, tokens()).shape[-1] == 80
