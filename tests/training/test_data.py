"""Packed folders: what is in them, that they are whole or not there, and what is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import data as data_module
from training.config import DataConfig
from training.corpus import cut_document
from training.data import check_tokens, open_packed, prepare, split_documents
from training.packing import pack
from training.tokenizer import train_tokenizer

TEXTBOOKS = Path(__file__).parents[3] / "shared" / "corpus" / "openstax_val.parquet"
T = 16


def make_texts(count=300, seed=0):
    rng = np.random.default_rng(seed)
    words = ["looped", "model", "depth", "state", "shared", "<|endoftext|>", "naïve", "x = 1\n"]
    return [" ".join(rng.choice(words, rng.integers(3, 30))) + f" {i}" for i in range(count)]


def write_corpus(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def config(tmp_path):
    return DataConfig(
        corpus="json",
        files=[write_corpus(tmp_path / "corpus.jsonl", make_texts())],
        vocab_size=300,
        sequence_length=T,
        validation_fraction=0.1,
        packing_buffer=20,
    )


@pytest.fixture
def packed(config, tmp_path):
    return prepare(config, tmp_path / "packed", progress=False)


def hashes_below(texts, fraction):
    """Membership of the validation split by exact integers instead of floats."""
    bound = int(fraction * 2**64)
    return [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) < bound for text in texts]


def test_rows_are_those_of_each_split_tokenised_and_packed_alone(config, packed):
    """Split by integer hashes, tokenised one text at a time, packed here: equal rows."""
    texts = make_texts()
    in_validation = hashes_below(texts, config.validation_fraction)
    for rows, wanted in ((packed.train, False), (packed.validation, True)):
        ids = [
            packed.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            for text, inside in zip(texts, in_validation, strict=True)
            if inside == wanted
        ]
        expected = np.stack(list(pack(ids, row_length=T + 1, bos_token_id=0, buffer=20)))
        found = rows[np.arange(len(rows))]
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)


def test_bos_stands_only_in_front_of_documents_though_texts_spell_it_out(packed):
    """A tenth of the words spell <|endoftext|>; BOS is as frequent as documents, not as words."""
    rows = packed.train[np.arange(len(packed.train))]
    assert (rows[:, 0] == packed.bos_token_id).all()
    assert (rows == packed.bos_token_id).sum() <= packed.metadata["splits"]["train"]["documents"]


def test_metadata_counts_add_up_and_fingerprints_are_of_the_rows(config, packed):
    texts = make_texts()
    record = packed.metadata["splits"]
    for name, rows in (("train", packed.train), ("validation", packed.validation)):
        split = record[name]
        assert (
            split["rows"]
            == len(rows)
            == pq.read_metadata(packed.folder / f"{name}.parquet").num_rows
        )
        assert split["tokens"] == split["rows"] * (T + 1) + split["cropped"] + split["leftover"]
        content = rows[np.arange(len(rows))].tobytes()
        assert split["sha256"] == hashlib.sha256(content).hexdigest()
    assert record["train"]["documents"] + record["validation"]["documents"] == len(texts)
    size = sum(len(text.encode()) for text in texts)
    assert record["train"]["bytes"] + record["validation"]["bytes"] == size
    assert packed.data_fingerprint == record["train"]["sha256"]
    assert packed.val_fingerprint == record["validation"]["sha256"]
    assert packed.train_tokens == len(packed.train) * T
    assert packed.val_tokens == len(packed.validation) * T
    assert packed.sequence_length == T
    assert packed.metadata["tokenizer"]["vocab_size"] == len(packed.tokenizer)
    assert packed.metadata["corpus"]["documents"] == len(texts)


def test_rows_are_fixed_size_lists_of_int32_and_are_read_by_any_index_array(packed):
    schema = pq.read_schema(packed.folder / "train.parquet")
    assert str(schema.field("input_ids").type).startswith("fixed_size_list<")
    assert str(schema.field("input_ids").type).endswith(f"int32>[{T + 1}]")
    everything = packed.train[np.arange(len(packed.train))]
    some = np.array([3, 0, 3, len(packed.train) - 1])
    np.testing.assert_array_equal(packed.train[some], everything[some])
    assert packed.train[[2]].shape == (1, T + 1)


def test_the_same_settings_give_the_same_folder_elsewhere(config, packed, tmp_path):
    again = prepare(config, tmp_path / "elsewhere" / "packed", progress=False)
    assert again.metadata == packed.metadata


def test_membership_of_a_document_depends_on_its_text_alone():
    """Shuffled, halved and doubled corpora send each text to the same side."""
    texts = make_texts(400)

    def sides(documents):
        dataset = datasets.Dataset.from_dict({"text": documents})
        train, validation = split_documents(dataset, 0.2)
        assert sorted(train + validation) == list(range(len(documents)))
        return {documents[i] for i in train}, {documents[i] for i in validation}

    train, validation = sides(texts)
    assert 0.1 < len(validation) / len(texts) < 0.3  # 0.2 ± 5 standard deviations of 0.02
    assert sides([texts[i] for i in np.random.default_rng(0).permutation(400)]) == (
        train,
        validation,
    )
    assert sides(texts + texts) == (train, validation)
    half = sides(texts[::2])
    assert half[0] <= train and half[1] <= validation


def test_validation_gets_at_least_one_document_whatever_the_order():
    texts = make_texts(10)
    chosen = set()
    for order in (texts, texts[::-1]):
        _, validation = split_documents(datasets.Dataset.from_dict({"text": order}), 1e-12)
        assert len(validation) == 1
        chosen.add(order[validation[0]])
    assert len(chosen) == 1


def test_a_finished_folder_is_opened_and_not_made_again(config, packed, monkeypatch):
    monkeypatch.setattr(data_module, "load_corpus", lambda *_, **__: pytest.fail("made again"))
    again = prepare(config, packed.folder, progress=False)
    assert again.metadata == packed.metadata
    free = replace(config, separate_documents=True, allow_repeat=True)  # rows don't depend on these
    assert prepare(free, packed.folder, progress=False).metadata == packed.metadata


@pytest.mark.parametrize(
    ("field", "made", "asked"),
    [
        ("sequence_length", T, 2 * T),
        ("vocab_size", 300, 301),
        ("packing_buffer", 20, 21),
        ("validation_fraction", 0.1, 0.2),
        ("max_documents", None, 10),
        ("document_characters", None, 80),
        ("corpus", "json", "docstrings"),
    ],
)
def test_a_folder_made_with_another_setting_is_refused(config, packed, field, made, asked):
    before = (packed.folder / "metadata.json").read_bytes()
    with pytest.raises(ValueError) as error:
        prepare(replace(config, **{field: asked}), packed.folder, progress=False)
    message = str(error.value)
    assert message.startswith(f"data.{field}: {packed.folder} was made with {made!r}")
    assert f"asked for now is {asked!r}" in message
    assert "another folder" in message and "delete this one" in message
    assert (packed.folder / "metadata.json").read_bytes() == before


def test_a_corpus_file_that_grew_since_is_noticed(config, packed):
    write_corpus(Path(config.files[0]), make_texts(301))
    with pytest.raises(ValueError, match=r"data\.files \(.*corpus\.jsonl\).*bytes"):
        prepare(config, packed.folder, progress=False)


def test_a_given_tokenizer_is_used_and_one_that_changed_in_its_folder_is_noticed(config, tmp_path):
    train_tokenizer(make_texts(50), 280).save_pretrained(tmp_path / "tokenizer")
    given = replace(config, tokenizer=str(tmp_path / "tokenizer"))
    packed = prepare(given, tmp_path / "packed", progress=False)
    assert len(packed.tokenizer) == 280
    assert prepare(replace(given, vocab_size=999), packed.folder).metadata == packed.metadata
    train_tokenizer(make_texts(50), 281).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer sha256.*asked for now"):
        prepare(given, packed.folder, progress=False)


@pytest.mark.parametrize("step", ["_make_tokenizer", "_write_split", "_corpus_record"])
def test_an_interruption_leaves_nothing_that_is_taken_for_finished(
    config, tmp_path, monkeypatch, step
):
    folder = tmp_path / "packed"

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_module, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, folder, progress=False)
    assert not folder.exists()
    assert not (tmp_path / ".packed.partial").exists()
    assert len(prepare(config, folder, progress=False).train) > 0


def test_what_a_killed_process_left_is_cleared_and_a_folder_without_metadata_is_refused(
    config, tmp_path
):
    (tmp_path / ".packed.partial").mkdir()
    (tmp_path / ".packed.partial" / "train.parquet").write_bytes(b"half")
    packed = prepare(config, tmp_path / "packed", progress=False)
    (packed.folder / "metadata.json").unlink()
    for action in (lambda: prepare(config, packed.folder), lambda: open_packed(packed.folder)):
        with pytest.raises(ValueError, match=r"isn't finished \(no metadata.json\).*delete"):
            action()
    with pytest.raises(ValueError, match="doesn't exist"):
        open_packed(tmp_path / "nowhere")


def test_another_sequence_length_or_tokenizer_is_refused_on_opening(packed):
    assert open_packed(packed.folder, tokenizer=packed.tokenizer, sequence_length=T).train_tokens
    with pytest.raises(
        ValueError, match=rf"sequence_length: .* made with {T}, asked for now is 32"
    ):
        open_packed(packed.folder, sequence_length=32)
    with pytest.raises(ValueError, match="tokenizer sha256"):
        open_packed(packed.folder, tokenizer=train_tokenizer(make_texts(20), 270))


def test_files_that_disagree_with_the_metadata_are_refused(packed):
    train = packed.folder / "train.parquet"
    pq.write_table(pq.read_table(train).slice(1), train)
    with pytest.raises(ValueError, match=r"train\.parquet has \d+ rows, metadata\.json says"):
        open_packed(packed.folder)
    train.unlink()
    with pytest.raises(ValueError, match=r"train\.parquet has None rows"):
        open_packed(packed.folder)


def test_an_exchanged_tokenizer_in_the_folder_is_refused(packed):
    train_tokenizer(make_texts(20), 270).save_pretrained(packed.folder / "tokenizer")
    with pytest.raises(ValueError, match="is not the tokenizer that made the rows"):
        open_packed(packed.folder)


def test_another_schema_version_is_refused(packed):
    path = packed.folder / "metadata.json"
    path.write_text(json.dumps({**packed.metadata, "schema_version": 99}))
    with pytest.raises(ValueError, match="schema_version 99"):
        open_packed(packed.folder)


def test_a_corpus_too_small_for_a_row_or_a_split_is_refused_with_a_remedy(config, tmp_path):
    one = replace(config, max_documents=1)
    with pytest.raises(ValueError, match="has 1 document.*all of them taken for validation"):
        prepare(one, tmp_path / "one", progress=False)
    long = replace(config, sequence_length=100_000)
    with pytest.raises(ValueError, match=r"too few for one row of 100001.*lower data\.sequence_l"):
        prepare(long, tmp_path / "long", progress=False)
    assert not (tmp_path / "one").exists() and not (tmp_path / "long").exists()


def test_more_tokens_than_one_pass_need_allow_repeat(packed):
    held = len(packed.train) * T
    check_tokens(packed, held, False)
    check_tokens(packed, 3 * held, True)
    with pytest.raises(ValueError) as error:
        check_tokens(packed, 2 * held + held // 2, False)
    assert f"holds {held:,} for training" in str(error.value)
    assert "2.50 epochs" in str(error.value)
    assert "data.allow_repeat=true" in str(error.value)


def test_progress_is_shown_only_when_asked_for(config, tmp_path, capsys):
    prepare(config, tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")
    prepare(config, tmp_path / "shown", progress=True)
    assert "packing train" in capsys.readouterr().out


PARAGRAPH = st.text("ab \u00e9", min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=200, deadline=None)
@given(paragraphs=st.lists(PARAGRAPH, min_size=1, max_size=12), characters=st.integers(1, 40))
def test_parts_of_a_document_are_whole_paragraphs_as_many_as_fit(paragraphs, characters):
    """In order, none lost; a part above the limit is one paragraph; two neighbours would not fit into one part."""
    parts = cut_document("\n\n".join(paragraphs), characters)
    assert "\n\n".join(parts) == "\n\n".join(paragraphs)
    for part in parts:
        assert len(part) <= characters or part in paragraphs
    for part, following in zip(parts, parts[1:], strict=False):
        assert len(part) + 2 + len(following.split("\n\n")[0]) > characters


def test_none_and_a_limit_that_no_text_reaches_leave_texts_whole():
    text = "One.\n\nTwo, longer than the first.\n\n \n\n"
    assert cut_document(text, None) == cut_document(text, len(text)) == [text]
    assert cut_document(text, 28) == ["One.", "Two, longer than the first."]
    assert cut_document("x" * 50, 10) == ["x" * 50]  # nowhere to cut


@pytest.mark.parametrize("characters", [None, 60, 10_000])
def test_documents_are_split_whole_and_then_packed_by_their_parts(tmp_path, characters):
    """The split goes by the whole text's hash; rows are those of its parts, cut here by hand, each with its own BOS."""
    short = make_texts(240)
    texts = ["\n\n".join(short[i : i + 4]) for i in range(0, 240, 4)]
    config = DataConfig(
        corpus="json", files=[write_corpus(tmp_path / "corpus.jsonl", texts)], vocab_size=300,
        sequence_length=T, validation_fraction=0.2, packing_buffer=20, document_characters=characters,
    )  # fmt: skip
    packed = prepare(config, tmp_path / "packed", progress=False)

    def parts(text):
        """One paragraph after another, as long as the joined text stays within the limit."""
        found = []
        for paragraph in text.split("\n\n"):
            joined = [*found[-1:], paragraph]
            if found and len("\n\n".join(joined)) <= characters:
                found[-1] = "\n\n".join(joined)
            else:
                found.append(paragraph)
        return found

    in_validation = hashes_below(texts, 0.2)
    for rows, name, wanted in (
        (packed.train, "train", False),
        (packed.validation, "validation", True),
    ):
        chosen = [
            text for text, inside in zip(texts, in_validation, strict=True) if inside == wanted
        ]
        pieces = [part for text in chosen for part in (parts(text) if characters == 60 else [text])]
        assert len(pieces) > len(chosen) if characters == 60 else pieces == chosen
        ids = [
            packed.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
            for piece in pieces
        ]
        expected = np.stack(list(pack(ids, row_length=T + 1, bos_token_id=0, buffer=20)))
        np.testing.assert_array_equal(rows[np.arange(len(rows))], expected)
        record = packed.metadata["splits"][name]
        assert record["documents"] == len(pieces)
        assert record["bytes"] == sum(len(text.encode()) for text in chosen)


@pytest.mark.skipif(not TEXTBOOKS.exists(), reason="the textbook corpus is not here")
def test_textbooks_pack_into_rows_that_decode_to_their_beginnings(tmp_path):
    config = DataConfig(
        corpus="parquet", files=[str(TEXTBOOKS)], sequence_length=256, max_documents=60,
        validation_fraction=0.1,
    )  # fmt: skip
    packed = prepare(config, tmp_path / "packed", progress=False)
    texts = pq.read_table(TEXTBOOKS)["text"].to_pylist()[:60]
    for row in packed.train[np.arange(len(packed.train))]:
        begin = packed.tokenizer.decode(row[: list(row[1:]).index(0) + 1 if 0 in row[1:] else None])
        begin = begin.removeprefix("<|endoftext|>").rstrip("�")  # a crop may cut a character
        assert any(text.startswith(begin) for text in texts)
