"""How caches hold keys and values: which recurrence reads and writes which slot, their memory, what is refused.

The referee is the naive loop of conftest.py.
"""

import gc

import numpy as np
import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, StaticLayer

from hf_looped import accounting

ROUNDING = {
    "rtol": 0,
    "atol": 2e-4,
}  # float32 logits up to 15 after up to some twenty layers, against float64
ENTRIES = [
    {"injection": "linear", "state_init": "normal", "num_attention_heads": 4},
    {"injection": "additive", "num_attention_heads": 4},
    {"injection": "passthrough", "num_prelude_layers": 2, "num_coda_layers": 0},
    {"injection": "hyperconnections", "num_trained_recurrences": 5, "num_lanes": 3},
]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["injection"])
each_budget = pytest.mark.parametrize("m", [None, 1, 2])
IMPLEMENTATIONS = [None, "static", "offloaded", "offloaded_static"]


def cached_logits(model, ids, lengths, cache, **kwargs):
    with torch.no_grad():
        parts = ids.split(lengths, dim=1)
        return torch.cat([model(part, cache=cache, **kwargs).logits for part in parts], dim=1)


def new_cache(config, implementation):
    offloading = "offloaded" in (implementation or "")
    if "static" in (implementation or ""):
        return StaticCache(config=config, max_cache_len=14, offloading=offloading)
    return DynamicCache(config=config, offloading=offloading)


# Slots


@each_budget
@pytest.mark.parametrize("r", [1, 5])
@each_entry
def test_logits_and_slots_are_those_of_the_naive_loop(naive, tiny_model, tokens, entry, r, m):
    """Prefill in two chunks, then single tokens; a larger r than the config's 3 appends slots up to the budget."""
    model = tiny_model(**entry, num_cached_recurrences=m, num_key_value_heads=2)
    cache, lengths = DynamicCache(), [4, 3, 1, 1]
    actual = cached_logits(model, tokens(length=9), lengths, cache, num_recurrences=r)
    expected, loops = naive.logits(model, tokens(length=9), lengths, r)
    torch.testing.assert_close(actual, expected, **ROUNDING)
    assert len(cache.layers) == len(loops[0].keys) == 2 + min(m or r, r) * 2
    for slot, layer in enumerate(cache.layers):
        for held, name in ((layer.keys, "keys"), (layer.values, "values")):
            rows = np.stack([np.stack(getattr(loop, name)[slot], axis=1) for loop in loops])
            torch.testing.assert_close(held, torch.tensor(rows).float(), **ROUNDING)


@each_budget
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_cache_made_from_the_config_gives_the_logits_of_the_naive_loop(
    naive, tiny_model, tokens, inert_streams, implementation, m
):
    model = tiny_model(num_cached_recurrences=m)
    cache, lengths = new_cache(model.config, implementation), [5, 2, 1, 1, 1]
    actual = cached_logits(model, tokens(length=10), lengths, cache)
    expected, _ = naive.logits(model, tokens(length=10), lengths)
    torch.testing.assert_close(actual, expected, **ROUNDING)


def test_a_budget_changes_the_logits_after_the_first_call_and_not_in_it(tiny_model, tokens):
    """So that the comparisons above can fail: 0.1 is a thousand times their tolerance."""
    full, budget = (
        cached_logits(tiny_model(num_cached_recurrences=m), tokens(), [8, 4], DynamicCache())
        for m in (None, 1)
    )
    assert torch.equal(full[:, :8], budget[:, :8])
    assert (full - budget)[:, 8:].abs().amax(-1).min() > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("m", [3, 4])
def test_a_budget_of_all_recurrences_is_the_full_cache_bit_for_bit(
    tiny_model, tokens, inert_streams, implementation, m
):
    full, budget = (
        cached_logits(model, tokens(), [6, 3, 1, 1, 1], new_cache(model.config, implementation))
        for model in (tiny_model(), tiny_model(num_cached_recurrences=m))
    )
    assert torch.equal(full, budget)


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("r", [3, 6])
def test_a_cache_with_a_budget_takes_calls_with_more_recurrences(
    naive, tiny_model, tokens, implementation, r
):
    """r = 6 needs no more slots than the cache of the config's r = 3 has, and can follow it."""
    model = tiny_model(num_cached_recurrences=2)
    cache, loop = new_cache(model.config, implementation), naive.Loop(model)
    ids = tokens(rows=1)
    for part, recurrences in zip(ids.split([5, 4, 3], dim=1), (r, 4, r), strict=True):
        actual = cached_logits(model, part, [part.shape[1]], cache, num_recurrences=recurrences)
        expected = torch.tensor(loop.call(part[0].tolist(), recurrences)).float()
        torch.testing.assert_close(actual[0], expected, **ROUNDING)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("m", [None, 1, 2])
def test_offloaded_keys_are_back_on_their_device_when_they_are_read(
    naive, tiny_model, tokens, inert_streams, monkeypatch, implementation, m
):
    """Float64 plays the host's memory: keys and values left there would not fit the queries' float32."""

    def moved_to(dtype):
        def move(layer):
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)

        return move

    model = tiny_model(num_cached_recurrences=m)
    expected, _ = naive.logits(model, tokens(), [6, 4, 1, 1])
    for kind in (DynamicLayer, StaticLayer):
        monkeypatch.setattr(kind, "offload", moved_to(torch.float64))
        monkeypatch.setattr(kind, "prefetch", moved_to(torch.float32))
    cache = new_cache(model.config, implementation)
    actual = cached_logits(model, tokens(), [6, 4, 1, 1], cache)
    torch.testing.assert_close(actual, expected, **ROUNDING)
    away = [layer.keys.dtype == torch.float64 for layer in cache.layers if layer.is_initialized]
    assert sum(away) >= len(away) - 2  # the next call's first and first recurrent are fetched ahead


@pytest.mark.parametrize("m", [None, 1, 2])
def test_a_cache_in_eight_bits_gives_nearly_the_logits_of_a_full_one(naive, tiny_model, tokens, m):
    """Its three bits of mantissa round each value by up to 6 %: 10 % of the logits' size, alike for every budget."""
    model = tiny_model(num_cached_recurrences=m)
    cache = QuantizedCache(backend="fp8", config=model.config)
    actual = cached_logits(model, tokens(), [6, 3, 1, 1, 1], cache)
    expected, _ = naive.logits(model, tokens(), [6, 3, 1, 1, 1])
    assert (actual - expected).norm() < 0.1 * expected.norm()
    lengths = [layer.get_seq_length() for layer in cache.layers]
    used = 2 + (m or 3) * 2
    assert lengths == [12] * used + [0] * (8 - used)


# Generation on them


def left_padded(rows):
    """Rows of different lengths as one batch and its mask, padding (token 0) on the left."""
    length = max(len(row) for row in rows)
    batch, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length)
    for i, row in enumerate(rows):
        batch[i, length - len(row) :] = torch.tensor(row)
        mask[i, length - len(row) :] = 1
    return batch, mask.long()


def generated(model, batch, mask, **kwargs):
    """Greedy tokens [B, 4] and their logits [B, 4, V]."""
    output = model.generate(
        batch,
        attention_mask=mask,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return output.sequences[:, batch.shape[1] :].tolist(), torch.stack(output.logits, dim=1)


@each_budget
@pytest.mark.parametrize(
    ("implementation", "chunk"),
    [(None, None), ("static", None), *((implementation, 3) for implementation in IMPLEMENTATIONS)],
)
def test_left_padded_rows_generate_as_the_naive_loop_does_without_padding(
    naive, tiny_model, tokens, inert_streams, implementation, chunk, m
):
    """The prefill in chunks of three begins with one that is nothing but padding for the shorter row."""
    model = tiny_model(
        num_cached_recurrences=m, state_init="normal", num_attention_heads=4, num_key_value_heads=2
    )
    rows = [tokens(rows=1, length=n, seed=n)[0].tolist() for n in (4, 8)]
    batch, mask = left_padded(rows)
    found, logits = generated(
        model, batch, mask, cache_implementation=implementation, prefill_chunk_size=chunk
    )
    for i, row in enumerate(rows):
        padding = batch.shape[1] - len(row)
        edges = [0, *range(chunk, 8, chunk), 8] if chunk else [0, 8]
        calls = [
            row[max(a - padding, 0) : max(b - padding, 0)]
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        expected, scores = naive.greedy(model, [call for call in calls if call], 4, r=3)
        assert found[i] == expected
        torch.testing.assert_close(logits[i], scores, **ROUNDING)


@each_budget
@each_entry
def test_generate_makes_a_cache_for_more_recurrences_than_the_config_s(
    naive, tiny_model, tokens, entry, m
):
    model = tiny_model(**entry, num_cached_recurrences=m)
    ids = tokens(rows=1, length=5)
    expected, scores = naive.greedy(model, [ids[0].tolist()], 4, r=5)
    for implementation in (None, "static"):
        found, logits = generated(
            model,
            ids,
            torch.ones_like(ids),
            num_recurrences=5,
            cache_implementation=implementation,
        )
        assert found == [expected]
        torch.testing.assert_close(logits[0], scores, **ROUNDING)


@pytest.fixture
def few_objects_to_collect():
    """Continuous batching ends with full garbage collections, seconds where many packages are loaded."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("m", [None, 1, 2])
def test_the_paged_cache_gives_the_tokens_of_the_naive_loop(
    naive, tiny_model, tokens, few_objects_to_collect, m
):
    """A batch holds at most four tokens, so that the prompt of nine comes in calls of four, four and one."""
    model = tiny_model(num_cached_recurrences=m, num_attention_heads=4, num_key_value_heads=2)
    prompt = tokens(rows=1, length=9)[0].tolist()
    expected, _ = naive.greedy(model, [prompt[:4], prompt[4:8], prompt[8:]], 6, r=3)
    results = model.generate_batch(
        [prompt],
        GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=4),
    )
    assert [result.generated_tokens for result in results.values()] == [expected]


# Memory


def held_bytes(cache):
    """Bytes of the storages behind all keys and values, views of larger ones counted as the whole."""
    tensors = [
        t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)
    ]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@each_budget
@pytest.mark.parametrize("r", [None, 2, 6])
@pytest.mark.parametrize(
    ("implementation", "chunk"), [(None, None), ("static", None), ("static", 2)]
)
def test_the_cache_that_generate_makes_holds_the_bytes_that_accounting_says(
    tiny_model, tokens, implementation, chunk, r, m
):
    """Two rows of five prompt tokens and six new ones, whose last is in no cache; float32 has four bytes.

    For a prefill in chunks, Transformers allocates a static cache as a whole before the first call.
    """
    model = tiny_model(num_cached_recurrences=m, num_attention_heads=4, num_key_value_heads=2)
    cache = model.generate(
        tokens(length=5),
        attention_mask=torch.ones(2, 5, dtype=torch.long),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        num_recurrences=r,
        cache_implementation=implementation,
        prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    ).cache
    assert len(cache.layers) == 2 + min(m or 6, r or 3) * 2
    model.config.num_recurrences = r or 3
    per_token = accounting.kv_bytes_per_token(model.config, bytes_per_value=4)
    assert held_bytes(cache) == per_token * 2 * (5 + 6 - 1)


@pytest.mark.parametrize("m", [1, 2])
def test_recurrences_that_are_not_kept_leave_nothing_behind(tiny_model, tokens, m):
    """After a call on six tokens and one on three, each storage has room for just these nine."""
    model = tiny_model(num_cached_recurrences=m)
    cache = DynamicCache()
    cached_logits(model, tokens(length=9), [6, 3], cache, num_recurrences=5)
    assert len(cache.layers) == 2 + 2 * m
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (2, 2, 9, 16)
        assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 4


# What is refused


def test_generate_refuses_a_given_cache_with_too_few_slots_and_takes_one_of_that_size(
    tiny_model, tokens
):
    model = tiny_model()
    ids = tokens(length=5)
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "pad_token_id": 0}
    for implementation in (None, "static"):
        cache = new_cache(model.config, implementation)
        with pytest.raises(
            ValueError, match=r"8 slots, but num_recurrences = 6 uses 14\. Pass cache="
        ):
            model.generate(ids, cache=cache, num_recurrences=6, **common)
    expected = model.generate(ids, num_recurrences=6, do_sample=False, **common)
    larger = tiny_model(num_recurrences=6).config
    for implementation in (None, "static"):
        cache = new_cache(larger, implementation)
        found = model.generate(ids, cache=cache, num_recurrences=6, do_sample=False, **common)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("implementation", [None, "static", "lazy"])
def test_a_cache_filled_with_fewer_recurrences_is_refused(tiny_model, tokens, implementation):
    model = tiny_model()
    cache = DynamicCache() if implementation == "lazy" else new_cache(model.config, implementation)
    cached_logits(model, tokens(length=5), [5], cache, num_recurrences=2)
    remedy = r"holds 5 tokens, but only 0 of them for num_recurrences = 3.* a new cache"
    with pytest.raises(ValueError, match=remedy):
        model(tokens(length=1), cache=cache)
    assert cached_logits(model, tokens(length=1), [1], cache, num_recurrences=1).isfinite().all()


@pytest.mark.parametrize("implementation", [None, "static"])
def test_recurrences_may_become_fewer_on_one_cache_but_not_more_again(
    naive, tiny_model, tokens, implementation
):
    """Fewer read full slots and leave the others behind; the calls with fewer are those of the naive loop."""
    model = tiny_model()
    cache, loop = new_cache(model.config, implementation), naive.Loop(model)
    ids = tokens(rows=1, length=8)
    for part, r in ((ids[:, :5], 3), (ids[:, 5:7], 2)):
        actual = cached_logits(model, part, [part.shape[1]], cache, num_recurrences=r)
        expected = torch.tensor(loop.call(part[0].tolist(), r)).float()
        torch.testing.assert_close(actual[0], expected, **ROUNDING)
    with pytest.raises(ValueError, match="holds 7 tokens, but only 5 of them for num_recurrences"):
        model(ids[:, 7:], cache=cache, num_recurrences=3)


def test_a_static_cache_without_room_for_the_new_tokens_is_refused(tiny_model, tokens):
    model = tiny_model()
    cache = new_cache(model.config, "static")
    cached_logits(model, tokens(length=12), [12], cache)
    with pytest.raises(ValueError, match="room for 14 tokens, but holds 12 and gets 3 .* >= 15"):
        model(tokens(length=3), cache=cache)
    assert cached_logits(model, tokens(length=2), [2], cache).isfinite().all()
    ids = tokens(length=12)
    with pytest.raises(ValueError, match="room for 14 tokens.* >= 15"):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=new_cache(model.config, "static"),
            max_new_tokens=5,
            pad_token_id=0,
        )


# On a GPU, where the offloading streams are real


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_budget
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_caches_on_a_gpu_give_the_logits_of_those_that_stay(
    tiny_model, tokens, implementation, m
):
    """Long enough that copies still run when the next recurrence wants them; the same products on the same device."""
    model = tiny_model(num_cached_recurrences=m, num_recurrences=4, hidden_size=256).cuda()
    ids = tokens(rows=4, length=900).cuda()
    lengths = [600, 290, *[1] * 10]

    def logits(kind, **kwargs):
        made = {"config": model.config} | ({"max_cache_len": 900} if kind is StaticCache else {})
        return cached_logits(model, ids, lengths, kind(**made, **kwargs))

    kind = StaticCache if "static" in implementation else DynamicCache
    torch.testing.assert_close(logits(kind, offloading=True), logits(kind), **ROUNDING)
