"""Bad input gives one error that names it, its value, and what is needed."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.configuration_looped import CONFIG_VERSION

ROWS, T, V, D = 2, 12, 64, 32


def embeddings(*shape):
    return torch.zeros(shape)


SHAPES = {
    "tokens-without-rows": (
        lambda ids: {"input_ids": ids[0]},
        r"input_ids has the shape \(12,\): \[B, T\]",
    ),
    "tokens-with-three-axes": (
        lambda ids: {"input_ids": ids[None]},
        r"input_ids has the shape \(1, 2, 12\)",
    ),
    "embeddings-without-rows": (
        lambda ids: {"inputs_embeds": embeddings(T, D)},
        r"inputs_embeds has the shape \(12, 32\): \[B, T, 32\]",
    ),
    "embeddings-of-another-width": (
        lambda ids: {"inputs_embeds": embeddings(ROWS, T, 8)},
        r"inputs_embeds has the shape \(2, 12, 8\): \[B, T, 32\]",
    ),
    "mask-too-short": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones(ROWS, 5)},
        r"attention_mask has the shape \(2, 5\), .* 2 rows of 12 tokens",
    ),
    "mask-too-long": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones(ROWS, 15)},
        r"attention_mask has the shape \(2, 15\)",
    ),
    "mask-of-other-rows": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones(3, T)},
        r"attention_mask has the shape \(3, 12\)",
    ),
    "mask-without-rows": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones(T)},
        r"attention_mask has the shape \(12,\)",
    ),
    "mask-with-three-axes": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones(ROWS, T, T)},
        r"attention_mask has the shape \(2, 12, 12\)",
    ),
    "mask-of-pairs-of-other-tokens": (
        lambda ids: {"input_ids": ids, "attention_mask": torch.zeros(ROWS, 1, 5, T)},
        r"attention_mask has the shape \(2, 1, 5, 12\)",
    ),
    "positions-of-other-tokens": (
        lambda ids: {"input_ids": ids, "position_ids": torch.arange(5)[None]},
        r"position_ids has the shape \(1, 5\), .* 2 rows of 12 new tokens",
    ),
    "positions-of-other-rows": (
        lambda ids: {"input_ids": ids, "position_ids": torch.arange(T).expand(3, T)},
        r"position_ids has the shape \(3, 12\)",
    ),
    "positions-without-rows": (
        lambda ids: {"input_ids": ids[:, :2], "position_ids": torch.arange(2)},
        r"position_ids has the shape \(2,\)",
    ),
    "positions-with-three-axes": (
        lambda ids: {"input_ids": ids, "position_ids": torch.arange(T)[None, None]},
        r"position_ids has the shape \(1, 1, 12\)",
    ),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("arguments", "message"), SHAPES.values(), ids=SHAPES)
def test_inputs_of_another_shape_are_refused(tiny_model, tokens, attention, arguments, message):
    model = tiny_model(attention)
    for training in (False, True):
        with pytest.raises(ValueError, match=message):
            model.train(training)(**arguments(tokens()))


LABELS = {
    "too-short": lambda ids: ids[:, :5],
    "of-other-rows": lambda ids: ids[:1],
    "without-rows": lambda ids: ids[0],
    "turned": lambda ids: ids.T,  # as many of them as tokens
}


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("wrong", LABELS.values(), ids=LABELS)
def test_labels_of_another_shape_are_refused(tiny_model, tokens, name, skip_logits, wrong):
    ids = tokens()
    labels = wrong(ids).contiguous()
    with pytest.raises(ValueError, match=rf"\b{name} has the shape \({labels.shape[0]},"):
        tiny_model()(ids, **{name: labels}, skip_logits=skip_logits)


@pytest.mark.parametrize("wrong", [V, 10**6, -1])
def test_a_token_outside_of_the_vocabulary_is_refused(tiny_model, tokens, wrong):
    ids = tokens()
    ids[1, 3] = wrong
    with pytest.raises(ValueError, match=rf"input_ids holds .*{wrong}.*0\.\.63"):
        tiny_model()(ids)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("wrong", [V, -1, -101])
def test_a_label_outside_of_the_vocabulary_is_refused(tiny_model, tokens, name, skip_logits, wrong):
    """−100 is none of them: it isn't scored."""
    labels = tokens()
    labels[0, :5] = -100
    labels[1, 3] = wrong
    with pytest.raises(ValueError, match=rf"labels holds {wrong}\b.*0\.\.63"):
        tiny_model()(tokens(), **{name: labels}, skip_logits=skip_logits)


def test_both_or_neither_of_tokens_and_embeddings_are_refused(tiny_model, tokens):
    model, ids = tiny_model(), tokens()
    both = {"input_ids": ids, "inputs_embeds": embeddings(ROWS, T, D)}
    for either in (model, model.model):
        for arguments in (both, {}, {"attention_mask": torch.ones(ROWS, T)}):
            with pytest.raises(ValueError, match="Exactly one of input_ids and inputs_embeds"):
                either(**arguments)


# Checkpoints


def change_weights(folder, change):
    """Rewrite the folder's weights by a function on the dict of them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_checkpoint_with_missing_and_foreign_weights_is_refused_with_their_names(
    tiny_model, tmp_path
):
    """Asked for the loading info, the caller gets both: the model and what was wrong."""
    model = tiny_model()
    model.save_pretrained(tmp_path)

    def change(weights):
        del weights["model.norm.weight"]
        weights["model.coda.7.mlp.up_proj.weight"] = torch.zeros(2, 2)

    change_weights(tmp_path, change)
    names = r"missing: model\.norm\.weight; unexpected: model\.coda\.7\.mlp\.up_proj\.weight"
    with pytest.raises(ValueError, match=names):
        LoopedForCausalLM.from_pretrained(tmp_path)
    loaded, info = LoopedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"}
    assert info["unexpected_keys"] == {"model.coda.7.mlp.up_proj.weight"}
    assert (loaded.model.norm.weight == 1).all()  # as in a new model
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"injection": "passthrough"}, r"unexpected: model\.injection\.proj\.weight"),
        (
            {"injection": "hyperconnections"},
            r"missing: model\.injection\.alpha, model\.injection\.beta, model\.injection\.mixing; unexpected: "
            r"model\.injection\.proj\.weight",
        ),
        ({"num_coda_layers": 2}, r"missing: model\.coda\.1\.input_layernorm\.weight, "),
        (
            {"num_recurrent_layers": 1},
            r"unexpected: model\.recurrent\.1\.input_layernorm\.weight, ",
        ),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tiny_model, tmp_path, fields, names):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=names):
        LoopedForCausalLM.from_pretrained(tmp_path, **fields)


def test_weights_of_another_shape_are_refused_with_both_shapes(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight.*64, 32.*80, 32"):
        LoopedForCausalLM.from_pretrained(tmp_path, vocab_size=80)
    loaded = LoopedForCausalLM.from_pretrained(
        tmp_path, vocab_size=80, ignore_mismatched_sizes=True
    )
    assert loaded.lm_head.weight.shape == (80, 32)


def test_a_config_of_a_newer_format_is_refused(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    newer = json.loads(path.read_text()) | {"config_version": CONFIG_VERSION + 1}
    path.write_text(json.dumps(newer))
    message = rf"config_version is {CONFIG_VERSION + 1}.*up to version {CONFIG_VERSION}; upgrade"
    for load in (LoopedConfig.from_pretrained, LoopedForCausalLM.from_pretrained):
        with pytest.raises(StrictDataclassError, match=message):
            load(tmp_path)
