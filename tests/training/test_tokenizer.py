"""The trained tokenizer keeps every text whole, and is the same one whoever trains or loads it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training.tokenizer import load_tokenizer, tokenizer_fingerprint, train_tokenizer

TEXTS = [
    f"The {noun} of a looped model is {adjective}.\n    Returns\n    -------\n"
    for noun in ("width", "depth", "loss", "state")
    for adjective in ("small", "large", "shared", "déjà vu")
] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 320)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    """Also with special tokens on: then BOS stands in front and nothing else changes."""
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *plain]


@pytest.mark.parametrize("text", ["  two  spaces .", "don 't", "<|endoftext|>", "\r\n\t", "🙂 ǅ"])
def test_text_that_cleaning_would_change_is_left_alone(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_one_token_with_id_0_is_bos_eos_and_padding_and_the_size_is_as_asked(tokenizer):
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert len(tokenizer) == 320


def test_the_first_merge_is_the_most_frequent_pair_of_bytes(tokenizer):
    """Counted here by hand inside whitespace-led words, as byte-pair encoding defines it."""
    pairs = Counter()
    for text in ["th the then that", "th"]:
        for word in text.split(" "):
            pairs.update(zip(word, word[1:], strict=False))
    small = train_tokenizer(["th the then that", "th"], 258)
    (first, second), _ = pairs.most_common(1)[0]
    assert small.convert_ids_to_tokens(257) == first + second == "th"


def test_the_saved_tokenizer_loads_as_the_same_one(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[3] + "🙂") == tokenizer.encode(TEXTS[3] + "🙂")
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    assert loaded.decode(loaded.encode("a  b .", add_special_tokens=False)) == "a  b ."


def test_the_fingerprint_ignores_padding_and_sees_another_vocabulary_or_bos(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(train_tokenizer(TEXTS, 319)) != before
    other = train_tokenizer(TEXTS, 320)
    other.bos_token = "a"
    assert tokenizer_fingerprint(other) != before


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_training_again_with_or_without_threads_gives_the_same_tokenizer(
    tokenizer, monkeypatch, parallel
):
    """The hash maps of the trainer are seeded anew each time; ties must not show it."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    for _ in range(3):
        again = train_tokenizer(iter(TEXTS), 320)
        assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(size):
    with pytest.raises(ValueError, match=rf"data\.vocab_size: {size} is below 257.*ask for more"):
        train_tokenizer(TEXTS, size)


def test_a_tokenizer_without_bos_is_refused_with_a_suggestion(tokenizer, tmp_path):
    without = train_tokenizer(TEXTS, 300)
    without.bos_token = None
    without.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no bos_token.*bos_token = '<\|endoftext\|>'"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*empty.* cannot be loaded"):
        (tmp_path / "empty").mkdir()
        load_tokenizer(str(tmp_path / "empty"))
