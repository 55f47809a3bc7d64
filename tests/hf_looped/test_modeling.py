"""The model as a citizen of Transformers: loading, decoding, losses, gradients, attention, noise, initialisation."""

import copy
import importlib.util

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from hf_looped import LoopedConfig, LoopedForCausalLM, LoopedModel
from hf_looped.modeling_looped import LoopedMLP, position_noise

INJECTIONS = ["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
ENTRIES = [  # every injection with every initial state that the config allows
    *((i, s) for i in ("linear", "additive") for s in ("prelude", "zeros", "normal")),
    ("passthrough", "prelude"),
    ("hyperconnections", "prelude"),
]
each_injection = pytest.mark.parametrize("injection", INJECTIONS)
each_entry = pytest.mark.parametrize(("injection", "state_init"), ENTRIES)
ROUNDING = {
    "rtol": 0,
    "atol": 1e-4,
}  # float32 logits up to 15 after some ten layers, summed in another order


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **({"use_cache": False} | kwargs)).logits


# Loading


def test_importing_the_package_registers_the_architecture(tiny_config, tmp_path):
    config = tiny_config()
    assert type(AutoConfig.for_model("looped")) is LoopedConfig
    assert type(AutoModel.from_config(config)) is LoopedModel
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is LoopedForCausalLM
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LoopedConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LoopedForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path)) is LoopedModel


@pytest.mark.parametrize("tied", [False, True])
@each_injection
def test_saved_model_comes_back_bit_for_bit(tiny_model, tokens, tmp_path, injection, tied):
    model = tiny_model(injection=injection, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights, expected = loaded.state_dict(), model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


@each_injection
def test_loading_initialises_no_weight_that_the_checkpoint_holds(tiny_model, tmp_path, injection):
    """Every parameter is filled with a number of its own, which no initialisation would give."""
    model = tiny_model(injection=injection)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(1000 + number)
    model.save_pretrained(tmp_path)
    torch.manual_seed(99)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for number, (name, parameter) in enumerate(loaded.named_parameters()):
        assert (parameter == 1000 + number).all(), name


def test_a_weight_missing_from_the_checkpoint_is_initialised_as_in_a_new_model(
    tiny_model, tmp_path
):
    tiny_model(injection="linear").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    kept = {
        name: weight
        for name, weight in weights.items()
        if name not in ("model.injection.proj.weight", "lm_head.weight")
    }
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing: lm_head.weight, model.injection.proj.weight"):
        LoopedForCausalLM.from_pretrained(tmp_path)
    loaded, info = LoopedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.injection.proj.weight", "lm_head.weight"}
    eye_and_zeros = torch.cat((torch.eye(32), torch.zeros(32, 32)), dim=1)
    assert torch.equal(loaded.model.injection.proj.weight, eye_and_zeros)
    # 2,048 draws of N(0, 0.001): the standard deviation's own error is 1.6 %, four of them are allowed
    assert loaded.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.065)
    assert torch.equal(loaded.model.norm.weight, weights["model.norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_buffers_are_right_after_loading(tiny_model, tmp_path, dtype):
    """Loading builds the model on the meta device; the buffers are in no checkpoint. Equal up to float32's rounding."""
    tiny_model().save_pretrained(tmp_path)
    rotary = LoopedForCausalLM.from_pretrained(tmp_path, dtype=dtype).model.rotary_emb
    expected = torch.tensor([10000.0 ** (-2 * i / 16) for i in range(8)])
    for buffer in (rotary.inv_freq, rotary.original_inv_freq):
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=0)


def test_casting_the_model_does_not_round_its_frequencies(tiny_model):
    rotary = tiny_model().bfloat16().model.rotary_emb
    expected = torch.tensor([10000.0 ** (-2 * i / 16) for i in range(8)])
    for buffer in (rotary.inv_freq, rotary.original_inv_freq):
        torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=0)  # float32's rounding


# Decoding


def left_padded(rows):
    """Rows of different lengths as one batch and its mask, padding (token 0) on the left."""
    length = max(len(row) for row in rows)
    batch, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        batch[i, length - len(row) :] = row
        mask[i, length - len(row) :] = 1
    return batch, mask.long()


def greedy(model, ids, mask=None, **kwargs):
    mask = torch.ones_like(ids) if mask is None else mask
    new = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **new, **kwargs)[:, ids.shape[1] :]


@pytest.mark.parametrize("r", [1, 2, 3])
@each_entry
def test_greedy_tokens_don_t_depend_on_cache_batch_or_padding(
    tiny_model, tokens, injection, state_init, r
):
    """Grouped-query attention too. Equal tokens, not close logits."""
    model = tiny_model(
        injection=injection,
        state_init=state_init,
        num_recurrences=r,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    rows = [tokens(rows=1, length=n, seed=n)[0] for n in (4, 9)]
    batch, mask = left_padded(rows)
    with_cache = greedy(model, batch, mask, use_cache=True)
    assert torch.equal(greedy(model, batch, mask, use_cache=False), with_cache)
    for row, expected in zip(rows, with_cache, strict=True):
        assert torch.equal(greedy(model, row[None], use_cache=True)[0], expected)
        ids = row[None]  # the referee: no generate, no cache, no padding
        for _ in range(7):
            ids = torch.cat((ids, logits(model, ids)[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(ids[0, len(row) :], expected)


@pytest.mark.parametrize("r", [1, 2, 3, 5])
@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough"])
def test_r_of_a_call_gives_the_same_logits_with_and_without_cache_and_as_r_in_the_config(
    tiny_model, tokens, injection, r
):
    """The cache grows by slots when r is above the config's 3; one token a call after a first part of four."""
    model = tiny_model(injection=injection)
    ids = tokens()
    expected = logits(model, ids, num_recurrences=r)
    cache = DynamicCache()
    parts = [ids[:, :4], *ids[:, 4:].split(1, dim=1)]
    cached = [logits(model, part, cache=cache, use_cache=True, num_recurrences=r) for part in parts]
    assert len(cache.layers) == 1 + 2 * r + 1
    torch.testing.assert_close(torch.cat(cached, dim=1), expected, **ROUNDING)
    model.config.num_recurrences = r
    assert torch.equal(logits(model, ids), expected)


def test_r_of_a_call_changes_the_logits_and_reaches_the_model_through_generate(tiny_model, tokens):
    model = tiny_model()
    one, two = (logits(model, tokens(), num_recurrences=r) for r in (1, 2))
    assert (one - two).abs().max() > 0.1
    generated = greedy(model, tokens(), num_recurrences=1)
    assert torch.equal(generated[:, 0], one[:, -1].argmax(-1))
    assert torch.equal(greedy(model, tokens(), num_recurrences=1, use_cache=False), generated)


def test_hyperconnections_run_fewer_recurrences_than_trained_and_refuse_more(tiny_model, tokens):
    model = tiny_model(injection="hyperconnections")
    assert logits(model, tokens(), num_recurrences=2).isfinite().all()
    with pytest.raises(ValueError, match="num_recurrences is 4, .* for 3 recurrences .* at most"):
        model(tokens(), num_recurrences=4)


def test_no_recurrence_is_refused(tiny_model, tokens, tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="num_recurrences is 0"):
        model(tokens(), num_recurrences=0)
    model.save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="num_recurrences is 0"):
        LoopedForCausalLM.from_pretrained(tmp_path, num_recurrences=0)


@pytest.mark.parametrize("r", [2.0, "2", True])
def test_recurrences_that_are_no_whole_number_are_refused(tiny_model, tokens, r):
    with pytest.raises(ValueError, match="num_recurrences is .*whole number"):
        tiny_model()(tokens(), num_recurrences=r)


def test_a_cache_is_refused_where_gradient_checkpointing_would_write_it_twice(tiny_model, tokens):
    model = tiny_model().train()
    model.activation_checkpointing_enable()
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens(), cache=cache)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(tokens(), cache=cache)


@pytest.mark.parametrize("training", [True, False])
def test_positions_keep_documents_apart_also_where_a_cache_is_made(tiny_model, tokens, training):
    """Rows of two documents, with the config's use_cache: 1e-5 leaves room for products of other shapes."""
    model = tiny_model().train(training)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    packed = model(tokens(), position_ids=positions).logits
    parts = [model(tokens()[:, part]).logits for part in (slice(0, 5), slice(5, 12))]
    assert (packed - torch.cat(parts, dim=1)).abs().max() < 1e-5


def test_a_cache_of_fixed_length_that_is_too_short_is_refused_with_the_remedy(tiny_model, tokens):
    model = tiny_model()
    remedy = r"8 slots, but num_recurrences = 5 uses 12.*DynamicCache\(\)"
    for cache in (
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=16),
    ):
        with pytest.raises(ValueError, match=remedy):
            model(tokens(), cache=cache, num_recurrences=5)
    assert model(tokens(), cache=DynamicCache(config=model.config), num_recurrences=2) is not None


@each_injection
def test_a_static_cache_gives_the_logits_without_cache(tiny_model, tokens, injection):
    model = tiny_model(injection=injection)
    ids = tokens()
    cache = StaticCache(config=model.config, max_cache_len=16)
    parts = [ids[:, :4], *ids[:, 4:].split(1, dim=1)]
    cached = [logits(model, part, cache=cache, use_cache=True) for part in parts]
    torch.testing.assert_close(torch.cat(cached, dim=1), logits(model, ids), **ROUNDING)


def test_the_old_name_of_the_cache_is_accepted_with_a_warning(tiny_model, tokens):
    model = tiny_model()
    ids = tokens()
    cache = DynamicCache()
    with pytest.warns(FutureWarning, match="past_key_values"), torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
    assert cache.get_seq_length() == 8
    with pytest.warns(FutureWarning, match="past_key_values"), torch.no_grad():
        rest = model(ids[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 8:], **ROUNDING)


# Forward


@each_injection
def test_eager_and_sdpa_attention_agree_on_a_padded_batch(tiny_model, tokens, injection):
    fields = {"injection": injection, "num_attention_heads": 4, "num_key_value_heads": 2}
    batch, mask = left_padded([tokens(rows=1, length=n)[0] for n in (5, 11)])
    eager, sdpa = (
        logits(tiny_model(attention, **fields), batch, attention_mask=mask)
        for attention in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager[mask.bool()], sdpa[mask.bool()], **ROUNDING)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None,
    reason="needs a CUDA device and flash_attn",
)
def test_flash_attention_agrees_with_sdpa(tiny_model, tokens):
    """Both in bfloat16, eight bits: 3 % of the logits' size."""
    flash, sdpa = (
        logits(tiny_model(attention).to("cuda", torch.bfloat16), tokens().cuda())
        for attention in ("flash_attention_2", "sdpa")
    )
    assert (flash - sdpa).norm() <= 0.03 * sdpa.norm()


@each_injection
def test_a_changed_suffix_doesn_t_change_the_logits_before_it(tiny_model, tokens, injection):
    """Equal up to the order of sums, which the shape alone decides: the shapes are the same."""
    model = tiny_model(injection=injection)
    ids = tokens()
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 64
    before, after = logits(model, ids), logits(model, other)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-6)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(-1).min() > 0.1


def test_grouped_query_attention_is_full_attention_with_repeated_keys_and_values(
    tiny_model, tokens
):
    grouped = tiny_model(num_attention_heads=4, num_key_value_heads=2)
    full = tiny_model(num_attention_heads=4, num_key_value_heads=4)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.view(2, 8, 32)
            weights[name] = heads[[0, 0, 1, 1]].reshape(32, 32)
    full.load_state_dict(weights)
    torch.testing.assert_close(logits(grouped, tokens()), logits(full, tokens()), **ROUNDING)


def test_logits_are_soft_capped_in_float32(tiny_model, tokens):
    """15·tanh(x / 15) of raw logits that reach far beyond 15; float32 in a bfloat16 model too."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight *= 20
    capped = logits(model, tokens())
    with torch.no_grad():
        raw = model.model(tokens()).last_hidden_state @ model.lm_head.weight.T
    assert raw.abs().max() > 60
    torch.testing.assert_close(capped, 15 * torch.tanh(raw / 15), **ROUNDING)
    low = logits(copy.deepcopy(model).bfloat16(), tokens())
    assert low.dtype == capped.dtype == torch.float32
    assert low.abs().max() <= 15 and capped.abs().max() <= 15
    model.config.final_logit_softcapping = None
    torch.testing.assert_close(logits(model, tokens()), raw, rtol=1e-5, atol=1e-4)


def test_logits_of_a_bfloat16_model_are_those_of_float32_up_to_its_rounding(tiny_model, tokens):
    """Eight bits, about ten layers: 5 % of the logits' size."""
    model = tiny_model()
    full = logits(model, tokens())
    assert (logits(model.bfloat16(), tokens()) - full).norm() <= 0.05 * full.norm()


def cross_entropy_by_hand(scores, targets):
    """Losses in nats of the targets that are not −100, in float64."""
    losses = []
    for row, target_row in zip(scores.double(), targets.tolist(), strict=True):
        for values, target in zip(row, target_row, strict=True):
            if target != -100:
                losses.append(float(values.exp().sum().log() - values[target]))
    return losses


def test_loss_is_the_mean_cross_entropy_of_the_next_token(tiny_model, tokens):
    """1e-5: float32 against float64 for a mean near log(64) = 4.2. −100 is left out of the mean."""
    model = tiny_model()
    ids = tokens()
    labels = ids.clone()
    labels[0, 3:6] = -100
    shifted = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    with torch.no_grad():
        output = model(ids, labels=labels)
        assert torch.equal(output.logits, model(ids).logits)
        losses = cross_entropy_by_hand(output.logits, shifted)
        assert len(losses) == 2 * 11 - 3
        mean = sum(losses) / len(losses)
        assert output.loss.item() == pytest.approx(mean, abs=1e-5)
        assert model(ids, shift_labels=shifted).loss.item() == pytest.approx(mean, abs=1e-5)
        summed = model(ids, labels=labels, num_items_in_batch=7).loss.item()
        assert summed == pytest.approx(sum(losses) / 7, rel=1e-5)
        assert model(ids).loss is None


def test_logits_to_keep_scores_the_last_positions_or_the_given_ones(tiny_model, tokens):
    model = tiny_model()
    every = logits(model, tokens())
    torch.testing.assert_close(logits(model, tokens(), logits_to_keep=3), every[:, -3:], **ROUNDING)
    asked = torch.tensor([1, 4])
    torch.testing.assert_close(
        logits(model, tokens(), logits_to_keep=asked), every[:, asked], **ROUNDING
    )


def test_exactly_one_of_tokens_and_embeddings_is_taken(tiny_model, tokens):
    model = tiny_model()
    embeddings = model.get_input_embeddings()(tokens())
    assert torch.equal(logits(model, inputs_embeds=embeddings), logits(model, tokens()))
    for wrong in ({}, {"input_ids": tokens(), "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="Exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize("r", [1, 3, 5])
def test_hidden_states_are_those_of_every_executed_layer_and_the_first_input(tiny_model, tokens, r):
    model = tiny_model("eager")
    with torch.no_grad():
        output = model.model(
            tokens(), num_recurrences=r, output_hidden_states=True, output_attentions=True
        )
        first = model.model.embed_norm(model.model.embed_tokens(tokens()))
    assert len(output.hidden_states) == 1 + 2 * r + 1 + 1
    assert len(output.attentions) == 1 + 2 * r + 1
    assert torch.equal(output.hidden_states[0], first)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


# Documents of a packed row


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("injection", "state_init"),
    [("linear", "normal"), ("additive", "auto"), ("passthrough", "auto")],
)
def test_positions_that_begin_again_keep_documents_apart_and_continuous_ones_don_t(
    tiny_model, tokens, attention, injection, state_init
):
    model = tiny_model(attention, injection=injection, state_init=state_init)
    row = tokens(rows=1, length=12)
    positions = torch.tensor([[*range(5), *range(7)]])
    separate = torch.cat((logits(model, row[:, :5]), logits(model, row[:, 5:])), dim=1)
    packed = logits(model, row, position_ids=positions)
    torch.testing.assert_close(packed, separate, **ROUNDING)
    crossing = logits(model, row)
    torch.testing.assert_close(crossing[:, :5], separate[:, :5], **ROUNDING)
    assert (crossing[:, 5:] - separate[:, 5:]).abs().amax(-1).min() > 0.1


# Gradients


def gradients(model, ids, loss=None, **kwargs):
    model.zero_grad()
    (model(ids, labels=ids, use_cache=False, **kwargs).loss if loss is None else loss()).backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_equal_gradients(actual, expected, tolerance):
    """Relative to the norm of each parameter's gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            assert (actual[name] - gradient).norm() <= tolerance * gradient.norm(), name


def naive_truncated_loss(model, ids, k):
    """The looped forward written out, with the state detached before the last k recurrences."""
    inner, config = model.model, model.config
    positions = torch.arange(ids.shape[1])[None]
    hidden = inner.embed_norm(inner.embed_tokens(ids))
    causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)[None, None]
    common = {
        "attention_mask": causal,
        "position_embeddings": inner.rotary_emb(hidden, positions),
    }
    for layer in inner.prelude:
        hidden = layer(hidden, **common)
    e = hidden
    h = torch.zeros_like(e) if config.initial_state == "zeros" else e
    for t in range(config.num_recurrences):
        if t == config.num_recurrences - k and t > 0:
            h = h.detach()
        if config.injection == "linear":
            u = torch.nn.functional.linear(torch.cat((e, h), -1), inner.injection.proj.weight)
        else:
            u = h + e
        for layer in inner.recurrent:
            u = layer(u, **common)
        h = inner.recurrent_norm(u)
    for layer in inner.coda:
        h = layer(h, **common)
    raw = model.lm_head(inner.norm(h)).float()
    capped = 15 * torch.tanh(raw / 15)
    return torch.nn.functional.cross_entropy(capped[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


truncations = pytest.mark.parametrize(
    ("injection", "state_init", "k"),
    [
        ("linear", "prelude", 1),
        ("linear", "prelude", 2),
        ("linear", "zeros", 3),
        ("additive", "zeros", 1),
        ("additive", "prelude", 2),
    ],
)


@truncations
def test_truncated_gradients_are_those_of_a_detached_state(
    tiny_model, tokens, injection, state_init, k
):
    """The same operations in the same order: 1e-5 leaves room for another order of summing gradients."""
    model = tiny_model(
        "eager",
        injection=injection,
        state_init=state_init,
        num_recurrences=4,
        num_backprop_recurrences=k,
    ).train()
    actual = gradients(model, tokens())
    expected = gradients(model, tokens(), loss=lambda: naive_truncated_loss(model, tokens(), k))
    assert_equal_gradients(actual, expected, 1e-5)
    model.config.num_backprop_recurrences = None
    full = gradients(model, tokens())
    norms = [(full[name] - actual[name]).norm() / full[name].norm() for name in full]
    assert max(norms) > 0.01  # truncation changes something


@truncations
def test_autocast_loses_no_gradient_under_truncation(tiny_model, tokens, injection, state_init, k):
    """A weight cast under no_grad and kept in autocast's cache would give no gradient, an error of 1.

    Against the naive loop without that cache: it sums the recurrences' gradients of a weight in float32, the model in
    bfloat16, whose unit is 2^-8. 0.02 is some five of them.
    """
    model = tiny_model(
        "eager",
        injection=injection,
        state_init=state_init,
        num_recurrences=4,
        num_backprop_recurrences=k,
    ).train()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        loss = model(tokens(), labels=tokens(), use_cache=False).loss
    actual = gradients(model, tokens(), loss=lambda: loss)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = naive_truncated_loss(model, tokens(), k)
        same = model(tokens(), labels=tokens(), use_cache=False).loss
    expected = gradients(model, tokens(), loss=lambda: loss)
    uncached = gradients(model, tokens(), loss=lambda: same)
    assert all(gradient is not None for gradient in actual.values())
    assert_equal_gradients(actual, expected, 0.02)
    assert_equal_gradients(actual, uncached, 0.02)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("state_init", ["prelude", "zeros", "normal"])
@pytest.mark.parametrize("injection", ["linear", "additive"])
def test_every_parameter_gets_a_gradient_under_truncation(
    tiny_model, tokens, injection, state_init, k
):
    model = tiny_model(
        injection=injection, state_init=state_init, num_backprop_recurrences=k
    ).train()
    for name, gradient in gradients(model, tokens()).items():
        assert gradient is not None and gradient.norm() > 0, name


@each_injection
def test_every_parameter_gets_a_gradient_without_truncation(tiny_model, tokens, injection):
    model = tiny_model(injection=injection).train()
    for name, gradient in gradients(model, tokens()).items():
        assert gradient is not None and gradient.norm() > 0, name


@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough"])
def test_without_truncation_every_recurrence_of_a_call_is_differentiated(
    tiny_model, tokens, injection
):
    """num_backprop_recurrences = None means all, also when a call asks for more than the config's r."""
    model = tiny_model(injection=injection, num_recurrences=2).train()
    actual = gradients(model, tokens(), num_recurrences=5)
    model.config.num_recurrences = 5
    assert_equal_gradients(actual, gradients(model, tokens()), 1e-6)


def test_evaluation_is_never_truncated(tiny_model, tokens):
    """Gradients in eval mode (for saliency, say) are those of the whole model."""
    truncated = tiny_model(num_backprop_recurrences=1)
    assert_equal_gradients(gradients(truncated, tokens()), gradients(tiny_model(), tokens()), 1e-6)


@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("injection", INJECTIONS)
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(
    tiny_model, tokens, injection, k
):
    """The recomputation repeats the same operations: 1e-6."""
    if k is not None and injection in ("passthrough", "hyperconnections"):
        k = 3
    model = tiny_model(injection=injection, num_backprop_recurrences=k).train()
    calls = []
    for module in model.modules():
        if isinstance(module, LoopedMLP):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = gradients(model, tokens())
    assert len(calls) == 8
    model.activation_checkpointing_enable()
    actual = gradients(model, tokens())
    recomputed = 8 if k is None or k == 3 else 4
    assert len(calls) == 8 + 8 + recomputed
    assert_equal_gradients(actual, expected, 1e-6)


# Noise of the initial state


def mixed(x):
    """Finaliser of MurmurHash3 in NumPy's unsigned integers, with the published constants."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return x ^ (x >> np.uint64(33))


def test_position_noise_is_box_muller_over_a_published_hash():
    """Uniforms of 24 bits are rounded alike; 2e-5 is float32's error of logarithm, root and cosine."""
    positions, size, seed = np.array([0, 1, 7, 4095]), 16, 123
    counters = positions[:, None].astype(np.uint64) * np.uint64(2 * size) + np.arange(
        2 * size, dtype=np.uint64
    )
    bits = mixed(mixed(counters) ^ np.uint64(seed)) >> np.uint64(40)
    uniform = ((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)).astype(float)
    expected = np.sqrt(-2 * np.log(uniform[:, :size])) * np.cos(2 * np.pi * uniform[:, size:])
    actual = position_noise(torch.tensor(positions)[None], size, seed)[0].double()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_position_noise_is_standard_normal_and_uncorrelated():
    """n = 262,144 numbers; each moment within four of its own standard deviations, √(k/n) with k = 1, 2, 15, 96."""
    noise = position_noise(torch.arange(4096)[None], 64, seed=3)[0].double()
    n = noise.numel()
    assert noise.isfinite().all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((noise**power).mean() - moment) < 4 * (variance / n) ** 0.5
    other_seed = position_noise(torch.arange(4096)[None], 64, seed=4)[0].double()
    for a, b in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise, other_seed),
        (noise[1:], other_seed[:-1]),
    ):
        assert abs((a * b).mean()) < 4 / a.numel() ** 0.5


def test_position_noise_depends_on_seed_and_position_alone():
    positions = torch.tensor([[5, 0, 9], [9, 9, 5]])
    noise = position_noise(positions, 8, seed=1)
    assert noise.shape == (2, 3, 8) and noise.dtype == torch.float32
    assert torch.equal(noise, position_noise(positions, 8, seed=1))
    for i in range(2):
        for j in range(3):
            alone = position_noise(positions[i : i + 1, j : j + 1], 8, seed=1)[0, 0]
            assert torch.equal(noise[i, j], alone)
    assert not torch.equal(noise[0, 0], noise[0, 1])
    assert (noise != position_noise(positions, 8, seed=2)).float().mean() > 0.9


def test_random_state_is_drawn_anew_in_training_and_fixed_by_its_seed_in_evaluation(
    tiny_model, tokens
):
    model = tiny_model(state_init="normal")
    assert torch.equal(logits(model, tokens()), logits(model, tokens()))
    other = tiny_model(state_init="normal", state_seed=1)
    assert (logits(model, tokens()) - logits(other, tokens())).abs().max() > 0.01
    model.train()
    assert (logits(model, tokens()) - logits(model, tokens())).abs().max() > 0.01


# Initialisation


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_initial_weights_are_those_of_appendix_c(scale):
    """Standard deviations from n draws within four of their own errors: σ/√(2n) normal, σ/√(5n) uniform."""
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=500,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=scale,
    )
    for name, weight in LoopedForCausalLM(config).named_parameters():
        n, std = weight.numel(), weight.std().item()
        if "norm" in name:
            assert (weight == 1).all(), name
        elif name == "model.embed_tokens.weight":
            assert std == pytest.approx(scale, rel=4 / (2 * n) ** 0.5)
            assert weight.abs().max() > 3 * scale  # a normal's tail
        elif name == "lm_head.weight":
            assert std == pytest.approx(0.001 * scale, rel=4 / (2 * n) ** 0.5)
        elif "injection" not in name:
            fan_in = 256 if "down_proj" in name else 64
            bound = scale * (3 / fan_in) ** 0.5
            assert std == pytest.approx(scale / fan_in**0.5, rel=4 / (5 * n) ** 0.5), name
            assert 0.98 * bound < weight.abs().max() <= bound, name  # uniform up to its bound


def test_initial_linear_injection_passes_the_prelude_on():
    model = LoopedModel(LoopedConfig(vocab_size=8, hidden_size=16, num_attention_heads=2))
    expected = torch.cat((torch.eye(16), torch.zeros(16, 16)), dim=1)
    assert torch.equal(model.injection.proj.weight, expected)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_initial_hyperconnections_read_one_lane_in_turn_and_write_to_all(tiny_config, lanes):
    config = tiny_config(injection="hyperconnections", num_lanes=lanes, num_recurrences=5)
    injection = LoopedModel(config).injection
    assert injection.alpha.shape == injection.beta.shape == (5, lanes)
    assert injection.mixing.shape == (5, lanes, lanes)
    for t in range(5):
        assert injection.alpha[t].tolist() == [float(k == t % lanes) for k in range(lanes)]
        assert torch.equal(injection.mixing[t], torch.eye(lanes))
        assert injection.beta[t].tolist() == [1.0] * lanes
