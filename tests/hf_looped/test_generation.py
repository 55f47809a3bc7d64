"""What generate gives in each of its modes for any r, what continuous batching gives, and which states come out.

The referee of tokens is a loop over full forwards, without generate and without a cache.
"""

import functools
import gc

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    set_seed,
)

from hf_looped import LoopedConfig, LoopedForCausalLM

ROUNDING = {
    "rtol": 0,
    "atol": 1e-4,
}  # float32 logits up to 15 after some ten layers, summed in another order
ENTRIES = [  # tables for six recurrences, so that hyperconnections too can run 2·r
    {"injection": "linear", "state_init": "normal", "num_attention_heads": 4},
    {"injection": "additive", "num_attention_heads": 4},
    {"injection": "passthrough"},
    {"injection": "hyperconnections", "num_trained_recurrences": 6},
]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["injection"])
each_r = pytest.mark.parametrize("r", [1, 2, 3, 6])  # 1, r − 1, r and 2·r of the config
IMPLEMENTATIONS = [None, "static", "offloaded", "offloaded_static"]


@pytest.fixture
def lively_model(tiny_model):
    """`tiny_model` with a seed whose greedy tokens don't settle on a single one."""
    return functools.partial(tiny_model, seed=7)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **({"use_cache": False} | kwargs)).logits


def argmax_loop(model, ids, steps, r=None):
    """Greedy continuation [B, steps] by full forwards without a cache."""
    prompt = ids.shape[1]
    for _ in range(steps):
        ids = torch.cat((ids, logits(model, ids, num_recurrences=r)[:, -1:].argmax(-1)), dim=1)
    return ids[:, prompt:]


def generation(model, ids, steps=7, **kwargs):
    """Output of generate, greedy unless told otherwise."""
    kwargs = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": steps} | kwargs
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **kwargs)


def generated(model, ids, steps=7, **kwargs):
    """New tokens [B, steps] of generate, greedy unless told otherwise."""
    return generation(model, ids, steps, **kwargs).sequences[:, ids.shape[1] :]


@pytest.fixture
def recurrences_run(monkeypatch):
    """Function that watches a model; it gives the list of (model, r, new tokens) of every call, in order."""
    calls = []

    def watch(model):
        recur = model.model._recur

        def recorded(e, r, *args, **kwargs):
            calls.append((model, r, e.shape[1]))
            return recur(e, r, *args, **kwargs)

        monkeypatch.setattr(model.model, "_recur", recorded)
        return calls

    return watch


# Modes of generate


@each_r
@each_entry
def test_greedy_tokens_are_those_of_full_forwards_for_every_cache_and_r(
    tiny_model, tokens, inert_streams, entry, r
):
    """And their logits, which show more of the cache than the largest one."""
    model, ids = tiny_model(**entry, num_key_value_heads=2), tokens(length=5)
    expected = torch.cat((ids, argmax_loop(model, ids, 5, r)), dim=1)
    scores = logits(model, expected[:, :-1], num_recurrences=r)[:, 4:]
    settings = [{"use_cache": False}, *({"cache_implementation": i} for i in IMPLEMENTATIONS)]
    for setting in settings:
        output = generation(model, ids, 5, num_recurrences=r, output_logits=True, **setting)
        assert torch.equal(output.sequences, expected), setting
        torch.testing.assert_close(torch.stack(output.logits, dim=1), scores, **ROUNDING)


@pytest.mark.parametrize("r", [None, 6])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prefill_in_chunks_changes_no_token(
    lively_model, tokens, inert_streams, implementation, r
):
    model = lively_model()
    ids = tokens(length=8)
    expected = argmax_loop(model, ids, 5, r)
    for chunk in (1, 3):
        actual = generated(
            model,
            ids,
            5,
            num_recurrences=r,
            prefill_chunk_size=chunk,
            cache_implementation=implementation,
        )
        assert torch.equal(actual, expected), chunk


@pytest.mark.parametrize("r", [1, 3, 6])
@pytest.mark.parametrize("injection", ["linear", "hyperconnections"])
def test_beam_search_finds_the_same_beams_with_every_cache(
    lively_model, tokens, inert_streams, injection, r
):
    """Beams without a cache need no reordering of keys and values. Logits are made flat, so that beams overtake one
    another; their scores are mean log-probabilities, whose terms here are near log(64) = 4.2: 1e-5.
    """
    model, ids = lively_model(injection=injection, num_trained_recurrences=6), tokens(length=5)
    with torch.no_grad():
        model.lm_head.weight *= 0.1
    search = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 7,
        "do_sample": False,
        "pad_token_id": 0,
        "num_recurrences": r,
        "num_beams": 3,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = model.generate(ids, use_cache=False, **search)
    beams = expected.sequences
    shares = logits(model, beams[:, :-1], num_recurrences=r).log_softmax(-1)[:, 4:]
    mean = shares.gather(2, beams[:, 5:, None]).squeeze(2).mean(1)
    torch.testing.assert_close(expected.sequences_scores, mean, rtol=0, atol=1e-5)
    assert not torch.equal(beams[::2, 5:], argmax_loop(model, ids, 7, r))
    for implementation in IMPLEMENTATIONS:
        actual = model.generate(ids, cache_implementation=implementation, **search)
        assert torch.equal(actual.sequences, beams), implementation
        torch.testing.assert_close(actual.sequences_scores, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("r", [1, 6])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_sampling_with_a_seed_draws_the_same_tokens_with_and_without_cache(
    lively_model, tokens, implementation, r
):
    """Without top-k, at a temperature that leaves several tokens likely; the referee draws by hand."""
    model, ids = lively_model(), tokens(length=5)
    sampling = {"do_sample": True, "temperature": 3.0, "top_k": 0, "num_recurrences": r}
    drawn = []
    for kwargs in ({"use_cache": False}, {"cache_implementation": implementation}):
        set_seed(0)
        drawn.append(generated(model, ids, **sampling, **kwargs))
    set_seed(0)
    expected = ids
    for _ in range(7):
        shares = torch.softmax(logits(model, expected, num_recurrences=r)[:, -1] / 3.0, dim=-1)
        expected = torch.cat((expected, torch.multinomial(shares, 1)), dim=1)
    assert torch.equal(drawn[0], expected[:, 5:])
    assert torch.equal(drawn[1], expected[:, 5:])


@pytest.fixture
def llama():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("r", [None, 1, 6])
@pytest.mark.parametrize("assistant", ["looped", "llama"])
def test_assisted_decoding_gives_the_greedy_tokens(
    lively_model, tokens, llama, recurrences_run, assistant, r, implementation
):
    """The looped assistant has the model's weights and drafts with its own r = 2, which is sometimes right."""
    model, ids = lively_model(state_init="normal"), tokens(rows=1, length=6)
    expected = argmax_loop(model, ids, 12, r)
    draft = llama if assistant == "llama" else lively_model(state_init="normal", num_recurrences=2)
    calls = recurrences_run(model)
    if assistant == "looped":
        recurrences_run(draft)
    actual = generated(
        model,
        ids,
        12,
        assistant_model=draft,
        num_recurrences=r,
        cache_implementation=implementation,
    )
    assert torch.equal(actual, expected)
    assert {seen for who, seen, _ in calls if who is model} == {r or 3}
    assert {seen for who, seen, _ in calls if who is draft} == (
        {2} if assistant == "looped" else set()
    )
    verified = [new for who, _, new in calls if who is model]
    assert max(verified[1:]) > 1  # several drafted tokens at once
    if assistant == "looped":
        assert len(verified) < 12  # some were right


@pytest.mark.parametrize(("r", "exit_after"), [(None, 1), (None, 2), (6, 2)])
@pytest.mark.parametrize("injection", ["linear", "hyperconnections"])
def test_early_exit_drafts_with_fewer_recurrences_and_gives_the_greedy_tokens(
    lively_model, tokens, recurrences_run, injection, r, exit_after
):
    """assistant_early_exit counts recurrences, as it counts layers elsewhere."""
    model = lively_model(injection=injection, num_trained_recurrences=6)
    ids = tokens(rows=1, length=6)
    expected = argmax_loop(model, ids, 10, r)
    calls = recurrences_run(model)
    actual = generated(model, ids, 10, assistant_early_exit=exit_after, num_recurrences=r)
    assert torch.equal(actual, expected)
    assert {seen for _, seen, _ in calls} == {exit_after, r or 3}
    assert model.config.num_recurrences == 3 and model.config.num_hidden_layers == 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("r", [None, 6])
def test_prompt_lookup_gives_the_greedy_tokens(
    lively_model, tokens, inert_streams, recurrences_run, r, implementation
):
    """The prompt holds its own continuation, so that there is something to find."""
    model, start = lively_model(), tokens(rows=1, length=6)
    ids = torch.cat((start, argmax_loop(model, start, 8, r), start), dim=1)
    expected = argmax_loop(model, ids, 10, r)
    calls = recurrences_run(model)
    # lookup may propose tokens beyond the last one asked for, for which a static cache needs room
    room = {"max_cache_len": 40} if "static" in (implementation or "") else {}
    actual = generated(
        model,
        ids,
        10,
        prompt_lookup_num_tokens=3,
        num_recurrences=r,
        cache_implementation=implementation,
        **room,
    )
    assert torch.equal(actual, expected)
    assert max(new for _, _, new in calls[1:]) > 1


@pytest.mark.parametrize("r", [None, 6])
@pytest.mark.parametrize("kind", ["returned", "dynamic", "static"])
def test_generation_continues_on_the_cache_of_an_earlier_call(
    lively_model, tokens, recurrences_run, kind, r
):
    """A second turn of a chat: three tokens are appended and read with the last generated one, which is in no cache."""
    fields = {"state_init": "normal", "num_attention_heads": 4, "num_key_value_heads": 2}
    model, ids = lively_model(**fields), tokens(length=5)
    sized = lively_model(**fields, num_recurrences=r or 3).config
    given = {
        "returned": {},
        "dynamic": {"cache": DynamicCache()},
        "static": {"cache": StaticCache(config=sized, max_cache_len=32)},
    }[kind]
    first = generation(model, ids, 4, num_recurrences=r, **given)
    assert int(first.cache.get_seq_length()) == 5 + 4 - 1
    turn = torch.cat((first.sequences, tokens(length=3, seed=1)), dim=1)
    calls = recurrences_run(model)
    second = generated(model, turn, 5, num_recurrences=r, cache=first.cache)
    assert [new for _, _, new in calls] == [1 + 3, 1, 1, 1, 1]
    assert torch.equal(first.sequences[:, 5:], argmax_loop(model, ids, 4, r))
    assert torch.equal(second, argmax_loop(model, turn, 5, r))


def test_r_beyond_the_tables_of_hyperconnections_is_refused_wherever_it_is_asked_for(
    tiny_model, tokens, tmp_path
):
    model = tiny_model(injection="hyperconnections")
    for call in (model, model.model, lambda ids, **kwargs: generated(model, ids, **kwargs)):
        with pytest.raises(ValueError, match=r"num_recurrences is 4, .* 3 recurrences .* at most"):
            call(tokens(), num_recurrences=4)
    model.save_pretrained(tmp_path)
    for load in (LoopedForCausalLM, AutoModelForCausalLM, AutoConfig):
        with pytest.raises(
            StrictDataclassError, match="num_recurrences is 4: .* num_trained_recurrences = 3 only"
        ):
            load.from_pretrained(tmp_path, num_recurrences=4)
    assert generated(model, tokens(), 2, num_recurrences=2).shape == (2, 2)


# Continuous batching


@pytest.fixture
def few_objects_to_collect():
    """Continuous batching ends with full garbage collections, seconds where many packages are loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


def in_continuous_batches(model, prompts, steps, **kwargs):
    results = model.generate_batch(
        prompts,
        GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(num_blocks=16, page_size=8, max_batch_tokens=64),
        **kwargs,
    )
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("m", [None, 1, 2])
@each_entry
def test_continuous_batching_gives_the_tokens_of_generate(
    lively_model, tokens, few_objects_to_collect, entry, m
):
    """Rows of unequal length, generated each for itself; pages of eight tokens, so that rows reach over several."""
    model = lively_model(**entry, num_cached_recurrences=m, num_key_value_heads=2)
    prompts = [tokens(rows=1, length=n, seed=n)[0].tolist() for n in (4, 11, 1, 7)]
    expected = [generated(model, torch.tensor([prompt]))[0].tolist() for prompt in prompts]
    assert in_continuous_batches(model, prompts, 7) == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("r", [1, 5])
def test_continuous_batching_follows_a_changed_config(
    lively_model, tokens, few_objects_to_collect, attention, r
):
    model = lively_model(attention)
    prompts = [tokens(rows=1, length=n, seed=n)[0].tolist() for n in (3, 6)]
    model.config.num_recurrences = r
    expected = [argmax_loop(model, torch.tensor([prompt]), 5)[0].tolist() for prompt in prompts]
    assert in_continuous_batches(model, prompts, 5, num_recurrences=r) == expected


def test_continuous_batching_refuses_an_r_that_is_not_the_config_s(tiny_model):
    model = tiny_model()
    with pytest.raises(
        ValueError, match=r"num_recurrences is 5, .* model.config.num_recurrences = 5"
    ):
        in_continuous_batches(model, [[1, 2, 3]], 3, num_recurrences=5)


# Another r at loading


@pytest.mark.parametrize(("k", "load"), [(1, LoopedForCausalLM), (6, AutoModelForCausalLM)])
@each_entry
def test_r_at_loading_is_r_of_the_call_and_leaves_nothing_stale(
    tiny_model, tokens, tmp_path, entry, k, load
):
    """Nor after saving and loading what was loaded; loaded with the first r again, the config is the first, too."""
    model = tiny_model(**entry, num_key_value_heads=2)
    trained = model.config.num_trained_recurrences
    expected = logits(model, tokens(), num_recurrences=k)
    continued = argmax_loop(model, tokens(), 4, k)
    model.save_pretrained(tmp_path / "first")
    loaded = load.from_pretrained(tmp_path / "first", num_recurrences=k)
    loaded.save_pretrained(tmp_path / "second")
    for other in (loaded, load.from_pretrained(tmp_path / "second")):
        config = other.config
        assert (config.num_recurrences, config.num_trained_recurrences) == (k, trained)
        assert config.num_hidden_layers == 1 + 2 * k + 1
        assert len(DynamicCache(config=config).layers) == 1 + 2 * k + 1
        assert len(StaticCache(config=config, max_cache_len=4).layers) == 1 + 2 * k + 1
        assert torch.equal(logits(other, tokens()), expected)
        assert torch.equal(generated(other, tokens(), 4, cache_implementation="static"), continued)
    again = load.from_pretrained(tmp_path / "second", num_recurrences=3)
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    again.save_pretrained(tmp_path / "third")
    first, third = ((tmp_path / name / "config.json").read_text() for name in ("first", "third"))
    assert third == first


def test_truncation_that_a_smaller_r_at_loading_leaves_no_room_for_is_dropped(
    tiny_model, tokens, tmp_path
):
    model = tiny_model(num_backprop_recurrences=2)
    model.save_pretrained(tmp_path)
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path, num_recurrences=1)
    assert smaller.config.num_backprop_recurrences is None
    assert torch.equal(logits(smaller, tokens()), logits(model, tokens(), num_recurrences=1))
    smaller.save_pretrained(tmp_path / "smaller")
    kept = LoopedConfig.from_pretrained(tmp_path / "smaller")
    assert (kept.num_recurrences, kept.num_backprop_recurrences) == (1, None)
    for k in (2, 6):
        larger = AutoModelForCausalLM.from_pretrained(tmp_path, num_recurrences=k)
        assert larger.config.num_backprop_recurrences == 2


# Outputs


@each_r
@each_entry
def test_the_coda_on_a_recurrent_state_gives_the_logits_of_that_many_recurrences(
    tiny_model, tokens, entry, r
):
    """Coda, norm, head and soft cap by hand on state t, against a call with t + 1 recurrences."""
    model = tiny_model(**entry, num_key_value_heads=2)
    inner, ids = model.model, tokens()
    with torch.no_grad():
        states = model(ids, num_recurrences=r, output_recurrent_states=True).recurrent_states
    assert len(states) == r and all(state.shape == (2, 12, 32) for state in states)
    causal = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    for t, state in enumerate(states):
        with torch.no_grad():
            turns = inner.rotary_emb(state, torch.arange(12)[None])
            for layer in inner.coda:
                state = layer(state, attention_mask=causal, position_embeddings=turns)
            raw = inner.norm(state) @ model.lm_head.weight.T
        expected = logits(model, ids, num_recurrences=t + 1)
        torch.testing.assert_close(15 * torch.tanh(raw / 15), expected, **ROUNDING)


def test_recurrent_states_come_only_when_asked_for_and_from_a_cached_call_too(tiny_model, tokens):
    model, ids, cache = tiny_model(), tokens(), DynamicCache()
    with torch.no_grad():
        full = model(ids, output_recurrent_states=True, use_cache=False).recurrent_states
        assert model(ids[:, :8], cache=cache).recurrent_states is None
        rest = model(ids[:, 8:], cache=cache, output_recurrent_states=True).recurrent_states
        inner = model.model(ids, output_recurrent_states=True).recurrent_states
    for state, same, whole in zip(rest, inner, full, strict=True):
        torch.testing.assert_close(state, whole[:, 8:], **ROUNDING)
        assert torch.equal(same, whole)


@each_r
def test_generate_returns_the_hidden_states_of_every_executed_layer(tiny_model, tokens, r):
    """For the prompt and then for each new token; the same as those of one forward on all of them."""
    model, ids = tiny_model(), tokens(length=5)
    output = generation(
        model, ids, 4, num_recurrences=r, output_hidden_states=True, output_logits=True
    )
    read = output.sequences[:, :-1]
    with torch.no_grad():
        full = model(read, num_recurrences=r, output_hidden_states=True, use_cache=False)
    assert [len(states) for states in output.hidden_states] == [1 + 2 * r + 1 + 1] * 4
    for layer, expected in enumerate(full.hidden_states):
        actual = torch.cat([states[layer] for states in output.hidden_states], dim=1)
        torch.testing.assert_close(actual, expected, **ROUNDING)
    torch.testing.assert_close(torch.stack(output.logits, dim=1), full.logits[:, 4:], **ROUNDING)


@each_r
def test_attention_weights_are_causal_shares_one_set_for_each_executed_layer(tiny_model, tokens, r):
    model, ids, cache = tiny_model("eager", num_attention_heads=4), tokens(), DynamicCache()
    with torch.no_grad():
        full = model(ids, num_recurrences=r, output_attentions=True, use_cache=False).attentions
        model(ids[:, :8], num_recurrences=r, cache=cache)
        rest = model(ids[:, 8:], num_recurrences=r, cache=cache, output_attentions=True).attentions
    assert len(full) == 1 + 2 * r + 1
    ones = torch.ones(2, 4, 12)
    for weights, later in zip(full, rest, strict=True):
        assert weights.shape == (2, 4, 12, 12)
        torch.testing.assert_close(weights.sum(-1), ones, rtol=0, atol=1e-6)  # sums of twelve
        assert (weights.triu(1) == 0).all() and (weights >= 0).all()
        torch.testing.assert_close(later, weights[:, :, 8:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("r", [None, 5])
def test_a_tuple_holds_the_outputs_in_the_order_of_the_fields(tiny_model, tokens, r):
    model, ids = tiny_model("eager"), tokens()
    asked = {
        "num_recurrences": r,
        "output_hidden_states": True,
        "output_attentions": True,
        "output_recurrent_states": True,
        "use_cache": True,
    }
    for module, labels in ((model, {"labels": ids}), (model, {}), (model.model, {})):
        with torch.no_grad():
            named = module(ids, **asked, **labels)
            plain = module(ids, return_dict=False, **asked, **labels)
        assert isinstance(plain, tuple) and len(plain) == len(named)
        for (name, expected), actual in zip(named.items(), plain, strict=True):
            if name == "cache":
                assert isinstance(actual, DynamicCache) and actual.get_seq_length() == 12
            elif isinstance(expected, tuple):
                assert len(actual) == len(expected) >= (r or 3), name
                assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), name
            else:
                assert torch.equal(actual, expected), name
