"""Packed folders: what is in them, that they are whole or not there, and what is refused."""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import data as data_module
from training import packers, shards
from training.config import DataConfig
from training.corpus import cut_document
from training.data import check_tokens, open_packed, prepare, split_documents
from training.packing import pack
from training.shards import Rows, open_shards, shard_paths, write_shard
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


def parts_of(documents, buffer, most=16):
    """Neighbours stay together: as many parts as there are whole buffers, the first ones longer by one."""
    count = max(1, min(most, len(documents) // buffer))
    size, longer = divmod(len(documents), count)
    ends = [0]
    for part in range(count):
        ends.append(ends[-1] + size + (part < longer))
    return [documents[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def rows_of(tokenizer, texts, buffer=20):
    """Tokenise one text at a time and pack what is one part of a split."""
    ids = [
        tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        for text in texts
    ]
    return np.concatenate(list(pack(ids, row_length=T + 1, bos_token_id=0, buffer=buffer)))


def test_rows_are_those_of_each_part_of_a_split_tokenised_and_packed_alone(config, packed):
    """Split by integer hashes, divided by counting, tokenised one text at a time, packed here: equal rows."""
    texts = make_texts()
    in_validation = hashes_below(texts, config.validation_fraction)
    for rows, wanted in ((packed.train, False), (packed.validation, True)):
        chosen = [
            text for text, inside in zip(texts, in_validation, strict=True) if inside == wanted
        ]
        parts = parts_of(chosen, config.packing_buffer)
        assert len(parts) == (1 if wanted else 13)  # of 266 documents, 20 in the buffer
        found = rows[np.arange(len(rows))]
        assert found.dtype == np.int32
        expected = [rows_of(packed.tokenizer, part) for part in parts]
        np.testing.assert_array_equal(found, np.concatenate(expected))


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
        arrays = [np.load(path) for path in sorted((packed.folder / name).iterdir())]
        assert split["rows"] == len(rows) == sum(map(len, arrays))
        assert [shard["rows"] for shard in split["shards"]] == [len(array) for array in arrays]
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


def test_rows_are_read_by_any_index_array_across_shards(packed):
    """Referee: all shards loaded whole and put together. Numbers that no row has are refused."""
    paths = sorted((packed.folder / "train").iterdir())
    together = np.concatenate([np.load(path) for path in paths])
    assert together.dtype == np.uint16
    for wanted in (
        np.arange(len(together)),
        np.random.default_rng(0).integers(0, len(together), 50),
        [3, 0, 3, len(together) - 1],
        [2],
        [],
    ):
        found = packed.train[wanted]
        assert found.dtype == np.int32 and found.shape == (len(wanted), T + 1)
        np.testing.assert_array_equal(found, together[np.asarray(wanted, dtype=int)])
    for wrong in (-1, len(together)):
        with pytest.raises(IndexError, match=f"of {len(together)} rows"):
            packed.train[[0, wrong]]


@pytest.mark.parametrize("lengths", [[3], [0, 2, 0, 0, 1], [1, 4, 0]])
def test_shards_of_any_number_of_rows_come_back_as_they_were_written(tmp_path, lengths):
    """Also none: a shard whose documents don't fill a row is a file without rows."""
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 2**16, (length, 5)) for length in lengths]
    folder = tmp_path / "packed" / "train"
    folder.mkdir(parents=True)
    records = [
        write_shard(path, [block[:2], block[2:]], row_length=5, dtype="<u2")
        for path, block in zip(shard_paths(folder, len(blocks)), blocks, strict=True)
    ]
    rows, everything = open_shards(folder, records, 5), np.concatenate(blocks)
    np.testing.assert_array_equal(rows[np.arange(len(rows))], everything)
    assert rows.fingerprint() == hashlib.sha256(everything.astype("<i4").tobytes()).hexdigest()
    assert rows.fingerprint() == Rows([everything]).fingerprint()


def test_rows_stay_in_their_files_until_they_are_read(packed):
    """Mapped, not copied into memory: what is written to a file after it was opened is what comes out."""
    path = packed.folder / "train" / packed.metadata["splits"]["train"]["shards"][-1]["file"]
    last, token = len(packed.train) - 1, packed.train[len(packed.train) - 1][0, -1]
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(np.array([token ^ 1], dtype="<u2").tobytes())
    assert packed.train[last][0, -1] == token ^ 1


def test_files_are_uint16_as_long_as_that_holds_every_token():
    class Vocabulary:
        def __init__(self, entries):
            self.entries = entries

        def get_vocab(self):
            return {str(i): i for i in range(self.entries)}

    def dtype(entries):
        options = {"row_length": 9, "buffer": 1, "document_characters": None}
        return packers.Packer(tokenizer=Vocabulary(entries), **options).dtype

    assert dtype(65_536) == "<u2" and dtype(65_537) == "<i4"


def test_the_number_of_processes_changes_no_byte(config, tmp_path, monkeypatch, capsys):
    """This process alone, then two others: equal files, equal metadata, and a bar that arrives at the end."""
    alone = prepare(config, tmp_path / "alone", progress=False)
    monkeypatch.setattr(packers, "POOL_MIN_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    together = prepare(config, tmp_path / "together", progress=True)
    assert together.metadata == alone.metadata
    for name in ("train", "validation"):
        files = sorted(path.name for path in (alone.folder / name).iterdir())
        assert files == sorted(path.name for path in (together.folder / name).iterdir())
        for file in files:
            one, other = (packed.folder / name / file for packed in (alone, together))
            assert one.read_bytes() == other.read_bytes()
    assert "300/300" in capsys.readouterr().out.replace(" ", "")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["interruption", "error"])
def test_an_interruption_and_an_error_of_one_process_stop_all(packed, tmp_path, trouble):
    """Eight shards that take seconds each; no process is left, and not all documents were read."""
    texts = [" ".join(make_texts(50, seed)) for seed in range(100)] * 40
    documents = datasets.Dataset.from_dict({"text": texts})
    plan = packers.plan_shards(tmp_path, documents, range(len(texts)), most=8, buffer=20)
    if trouble == "error":
        plan[1] = replace(plan[1], path=tmp_path / "nowhere" / "shard.npy")
    packer = packers.Packer(
        tokenizer=packed.tokenizer, row_length=T + 1, buffer=20, document_characters=None
    )
    read = []

    def advance(documents):
        read.append(documents)
        if documents and trouble == "interruption":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if trouble == "interruption" else FileNotFoundError):
        packers.write_shards(packer, plan, processes=2, advance=advance)
    assert multiprocessing.active_children() == []
    assert sum(read) < len(texts)


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed(config, tmp_path):
    """Else they would write on in a folder that the next one clears."""
    texts = [" ".join(make_texts(50, seed)) for seed in range(100)] * 40
    file = write_corpus(tmp_path / "long.jsonl", texts)
    code = (
        "from pathlib import Path; import os; from training import config, data, packers\n"
        "packers.POOL_MIN_BYTES = 0; os.sched_getaffinity = lambda _: {0, 1}\n"
        f"options = {asdict(replace(config, files=[file]))}\n"
        f"data.prepare(config.DataConfig(**options), Path({str(tmp_path / 'packed')!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("packed.partial/train/*.npy")):
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) >= 2
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not (tmp_path / "packed").exists()


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
        ("packing_shards", 16, 2),
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
    packed.tokenizer.save_pretrained(tmp_path / "copy")  # the same one under another name
    moved = replace(given, tokenizer=str(tmp_path / "copy"))
    assert prepare(moved, packed.folder, progress=False).metadata == packed.metadata
    train_tokenizer(make_texts(50), 281).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer sha256.*asked for now"):
        prepare(given, packed.folder, progress=False)


@pytest.mark.parametrize("step", ["_make_tokenizer", "_split_record", "_corpus_record"])
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
    assert not (tmp_path / "packed.partial").exists()
    assert len(prepare(config, folder, progress=False).train) > 0


def test_what_a_killed_process_left_is_cleared_and_a_folder_without_metadata_is_refused(
    config, tmp_path
):
    left = tmp_path / "packed.partial" / "train"
    left.mkdir(parents=True)
    (left / "00013-of-00014.npy").write_bytes(b"half")
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


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "is missing": Path.unlink,
    r"has \d+ bytes, metadata.json says \d+": lambda path: os.truncate(path, 200),
    r"has changed: sha256 \w{12}, metadata.json says \w{12}": _flip_a_bit,
    "is not among the shards that metadata.json lists": lambda path: shutil.copy(
        path, path.with_name("00013-of-00014.npy")
    ),
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_shard_is_refused_with_its_name_and_a_remedy(packed, problem):
    """By opening and by preparing again; where the file is restored, the folder opens as before."""
    path = packed.folder / "train" / "00005-of-00013.npy"
    whole = path.read_bytes()
    DAMAGES[problem](path)
    named = path.with_name("00013-of-00014.npy") if "not among" in problem else path
    expected = (
        f"{named} {problem}; restore the file, or delete {packed.folder} and prepare it again"
    )
    with pytest.raises(ValueError, match=expected):
        open_packed(packed.folder)
    path.write_bytes(whole)
    if named != path:
        named.unlink()
    assert open_packed(packed.folder).metadata == packed.metadata


@pytest.mark.parametrize("where", ["shard", "split"])
def test_rows_that_disagree_with_the_metadata_are_refused(packed, where):
    metadata = json.loads((packed.folder / "metadata.json").read_text())
    split = metadata["splits"]["validation"]
    (split["shards"][0] if where == "shard" else split)["rows"] += 1
    (packed.folder / "metadata.json").write_text(json.dumps(metadata))
    rows = len(packed.validation)
    expected = {
        "shard": rf"00000-of-00001\.npy holds \({rows}, 17\), metadata.json says \({rows + 1}, 17\)",
        "split": rf"metadata\.json says {rows + 1} rows for validation, its shards hold {rows}",
    }[where]
    with pytest.raises(ValueError, match=expected):
        open_packed(packed.folder)
    (packed.folder / "metadata.json").write_text(json.dumps(metadata)[:-20])
    with pytest.raises(ValueError, match=r"metadata\.json is damaged .* prepare it again"):
        open_packed(packed.folder)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_is_said_in_one_sentence_and_leaves_nothing(
    config, tmp_path, monkeypatch, code
):
    """Blocks of rows are written until the disk is full; other errors of the system stay what they are."""
    join = shards.np.ascontiguousarray
    calls = []

    def fails(block, **options):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(code, os.strerror(code))
        return join(block, **options)

    kind, message = (ValueError, f"no space is left for {tmp_path / 'packed'} .*Free some space")
    if code == errno.EACCES:
        kind, message = PermissionError, "Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(shards.np, "ascontiguousarray", fails)
        with pytest.raises(kind, match=message):
            prepare(config, tmp_path / "packed", progress=False)
    assert not (tmp_path / "packed").exists() and not (tmp_path / "packed.partial").exists()
    assert len(prepare(config, tmp_path / "packed", progress=False).train) > 0


def test_an_exchanged_tokenizer_in_the_folder_is_refused(packed):
    train_tokenizer(make_texts(20), 270).save_pretrained(packed.folder / "tokenizer")
    with pytest.raises(ValueError, match="is not the tokenizer that made the rows"):
        open_packed(packed.folder)


def test_another_schema_version_is_refused(packed):
    path = packed.folder / "metadata.json"
    for version in (1, 99):
        path.write_text(json.dumps({**packed.metadata, "schema_version": version}))
        expected = f"schema_version {version}, this version of hf-looped reads 2; delete"
        with pytest.raises(ValueError, match=expected):
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
    assert "packing" in capsys.readouterr().out


def test_the_share_of_cropped_tokens_is_said(config, tmp_path, capsys, monkeypatch):
    """What the training texts have, BOS included, less what stands in rows; the last row's rest is not cropped."""
    monkeypatch.setenv("COLUMNS", "200")
    made = prepare(config, tmp_path / "shown", progress=True)
    texts = make_texts()
    inside = hashes_below(texts, config.validation_fraction)
    chosen = [text for text, out in zip(texts, inside, strict=True) if not out]
    options = {"add_special_tokens": False, "split_special_tokens": True}
    tokens = sum(1 + len(made.tokenizer.encode(text, **options)) for text in chosen)
    leftover = made.metadata["splits"]["train"]["leftover"]
    share = (tokens - len(made.train) * (T + 1) - leftover) / tokens
    assert share > 0.01
    said = " ".join(capsys.readouterr().err.split())
    assert f"best-fit packing cropped {share:.0%} of the documents' tokens" in said


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
        cut = [
            [part for text in some for part in (parts(text) if characters == 60 else [text])]
            for some in parts_of(chosen, 20)
        ]
        pieces = [piece for some in cut for piece in some]
        assert len(pieces) > len(chosen) if characters == 60 else pieces == chosen
        expected = np.concatenate([rows_of(packed.tokenizer, some) for some in cut])
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
