"""Packed data: a corpus split by document, tokenised and packed once, read by every run of a grid.

A folder holds `train/` and `validation/` (shards of rows of T + 1 tokens, see `shards`),
`tokenizer/` and `metadata.json`, which says how they were made and what each shard holds. It is
written beside its place and renamed when complete and on disk, so that a folder that is there is
finished; opening it compares every byte with the metadata.
"""

import errno
import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .corpus import Corpus, corpus_sources, load_corpus, progress_bar, quiet_datasets
from .files import new_folder
from .messages import say
from .packers import Packer, Shard, choose_processes, plan_shards, write_shards
from .shards import Rows, open_shards
from .tokenizer import load_tokenizer, tokenizer_fingerprint, train_tokenizer

SCHEMA_VERSION = 2
SPLITS = ("train", "validation")
MUCH_CROPPED = 0.6  # share of cropped tokens from which on there is a warning
# What the rows depend on; vocab_size counts only where the tokenizer is trained.
SETTINGS = (
    "corpus",
    "packages",
    "files",
    "dataset_config",
    "dataset_split",
    "text_column",
    "max_documents",
    "document_characters",
    "validation_fraction",
    "tokenizer",
    "vocab_size",
    "sequence_length",
    "packing_buffer",
    "packing_shards",
)


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """An open folder of packed data.

    `metadata` is metadata.json: settings, corpus (fingerprint, sources), tokenizer (sha256,
    vocab_size, bos_token_id), versions, sequence_length, and per split documents, bytes (UTF-8,
    of the documents), tokens (of the documents, BOS included), rows, cropped and leftover tokens,
    the SHA-256 over the rows, and `shards`: file, rows, bytes and SHA-256 of each.
    """

    folder: Path
    train: Rows
    validation: Rows
    tokenizer: PreTrainedTokenizerBase
    metadata: Mapping[str, Any]

    @property
    def sequence_length(self) -> int:
        """T; rows hold T + 1 tokens."""
        return int(self.metadata["sequence_length"])

    @property
    def bos_token_id(self) -> int:
        """Id of the token that every document begins with."""
        return int(self.metadata["tokenizer"]["bos_token_id"])

    @property
    def data_fingerprint(self) -> str:
        """SHA-256 over the training rows."""
        return str(self.metadata["splits"]["train"]["sha256"])

    @property
    def val_fingerprint(self) -> str:
        """SHA-256 over the validation rows."""
        return str(self.metadata["splits"]["validation"]["sha256"])

    @property
    def train_tokens(self) -> int:
        """Targets of one pass over the training rows, rows · T."""
        return len(self.train) * self.sequence_length

    @property
    def val_tokens(self) -> int:
        """Targets of one pass over the validation rows, rows · T."""
        return len(self.validation) * self.sequence_length


def prepare(data: DataConfig, folder: Path, *, progress: bool = True) -> PackedData:
    """Make `folder` from the corpus, or open it where it was finished with the same settings.

    Several processes may call this at once: one makes the folder, the others wait for it. Raises
    ValueError for the bad input that `load_corpus`, `train_tokenizer` and `load_tokenizer`
    refuse, for a split too small for one row, for a folder made with other settings, and where
    the disk is full. Package versions that changed since are no other settings: the rows stay as
    they are, with the versions they were made from in the metadata.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists() and any(folder.iterdir()):
            return _reopen(data, folder)
        try:
            with new_folder(folder) as partial:
                _write(data, partial, progress=progress)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"packed data: no space is left for {folder} ({error.strerror}); nothing of it was "
                "kept. Free some space, or name a folder on another disk."
            ) from error
        packed = open_packed(folder)
        if progress:
            _say_how_much_is_kept(packed)
        return packed


def _say_how_much_is_kept(packed: PackedData) -> None:
    split, console = packed.metadata["splits"]["train"], Console(stderr=True)
    cropped = split["cropped"] / split["tokens"]
    say(
        console,
        f"{split['rows']:,} rows of {packed.sequence_length} tokens for training; best-fit packing cropped "
        f"{cropped:.0%} of the documents' tokens",
    )
    if cropped > MUCH_CROPPED:
        say(
            console,
            f"warning: {cropped:.0%} of the text is lost, since the documents are long for rows of "
            f"{packed.sequence_length} tokens. Part them by blank lines (in text files), set "
            "data.document_characters to cut them at their own, or raise data.sequence_length.",
            style="yellow",
        )


def open_packed(
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    sequence_length: int | None = None,
) -> PackedData:
    """Open a finished folder.

    Raises ValueError when it isn't one, when its files don't agree with its metadata, or when it
    was made with another tokenizer or T than those given.
    """
    folder = Path(folder)
    metadata = _read_metadata(folder)
    made = metadata["sequence_length"]
    if sequence_length is not None and sequence_length != made:
        raise _disagreement(folder, "sequence_length", made, sequence_length)
    own = load_tokenizer(str(folder / "tokenizer"))
    recorded = metadata["tokenizer"]["sha256"]
    if tokenizer_fingerprint(own) != recorded:
        raise ValueError(
            f"packed data: {folder / 'tokenizer'} is not the tokenizer that made the rows "
            f"(sha256 {tokenizer_fingerprint(own)[:12]}, metadata.json says {recorded[:12]}); "
            f"delete {folder} and prepare it again."
        )
    if tokenizer is not None:
        other = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if tokenizer_fingerprint(other) != recorded:
            shown = f"{tokenizer_fingerprint(other)[:12]} ({other.name_or_path or 'unnamed'})"
            raise _disagreement(folder, "tokenizer sha256", recorded[:12], shown)
    return PackedData(
        folder=folder,
        train=_open_split(folder, "train", metadata),
        validation=_open_split(folder, "validation", metadata),
        tokenizer=own,
        metadata=metadata,
    )


def check_tokens(packed: PackedData, tokens_asked: int, allow_repeat: bool) -> None:
    """Raise ValueError when a run asks for more than one pass and may not repeat rows."""
    held = packed.train_tokens
    if tokens_asked > held and not allow_repeat:
        epochs = math.ceil(100 * tokens_asked / held) / 100
        raise ValueError(
            f"tokens: {tokens_asked:,} asked, but {packed.folder} holds {held:,} for training "
            f"({len(packed.train):,} rows of {packed.sequence_length}): that is {epochs:.2f} "
            "epochs. Set data.allow_repeat=true to read rows again, take a larger corpus, "
            "or ask for fewer tokens."
        )


def split_documents(documents: datasets.Dataset, fraction: float) -> tuple[list[int], list[int]]:
    """List the indices of training and of validation documents.

    A document belongs to validation when the hash of its text, a number in [0, 1), is below
    `fraction`; so membership depends neither on the order nor on the other documents, and equal
    texts stay together. Where none is, the one with the smallest hash goes to validation.
    """
    places = [_place(text) for batch in documents.iter(batch_size=1000) for text in batch["text"]]
    bound = max(fraction, math.nextafter(min(places), 1.0))
    train = [i for i, place in enumerate(places) if place >= bound]
    validation = [i for i, place in enumerate(places) if place < bound]
    return train, validation


def _place(text: str) -> float:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits: exact as a float


def _settings(data: DataConfig) -> dict[str, Any]:
    settings = {name: getattr(data, name) for name in SETTINGS}
    settings |= {name: list(settings[name]) for name in ("packages", "files")}
    if data.tokenizer is not None:
        settings["vocab_size"] = None
    return settings


def _write(data: DataConfig, folder: Path, *, progress: bool) -> None:
    scratch = folder / "corpus-cache"
    corpus = load_corpus(data, cache_dir=scratch, progress=progress)
    documents = corpus.documents
    train, validation = split_documents(documents, data.validation_fraction)
    if not train:
        raise ValueError(
            f"data.corpus: {data.corpus!r} has {len(documents)} document(s), all of them "
            f"taken for validation (data.validation_fraction = {data.validation_fraction}); "
            "give at least two documents (in text files, blank lines part them)."
        )
    tokenizer = _make_tokenizer(data, documents, train, progress=progress)
    tokenizer.save_pretrained(folder / "tokenizer")
    records = _write_splits(
        data,
        _on_disk(documents, scratch),
        (train, validation),
        tokenizer,
        folder,
        progress=progress,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "settings": _settings(data),
        "sequence_length": data.sequence_length,
        "tokenizer": {
            "sha256": tokenizer_fingerprint(load_tokenizer(str(folder / "tokenizer"))),
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
        },
        "corpus": _corpus_record(corpus),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("tokenizers", "transformers", "datasets")
        },
        "splits": records,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def _on_disk(documents: datasets.Dataset, scratch: Path) -> datasets.Dataset:
    """Documents in files, which several processes map; those in memory would be sent as copies."""
    if documents.cache_files:
        return documents
    with quiet_datasets():
        documents.save_to_disk(scratch / "documents")
        return datasets.load_from_disk(scratch / "documents")


def _corpus_record(corpus: Corpus) -> dict[str, Any]:
    return {
        "fingerprint": corpus.fingerprint,
        "documents": len(corpus.documents),
        "dropped": corpus.dropped,
        "sources": corpus.sources,
    }


def _make_tokenizer(
    data: DataConfig, documents: datasets.Dataset, train: Sequence[int], *, progress: bool
) -> PreTrainedTokenizerBase:
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    with progress_bar("training tokenizer", len(train), enabled=progress) as advance:

        def texts() -> Iterator[str]:
            for batch in documents.select(train).iter(batch_size=1000):
                yield from batch["text"]
                advance(len(batch["text"]))

        return train_tokenizer(texts(), data.vocab_size)


def _write_splits(
    data: DataConfig,
    documents: datasets.Dataset,
    indices: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    progress: bool,
) -> dict[str, Any]:
    """Write the shards of both splits, whose documents `indices` lists; returns the records."""
    packer = Packer(
        tokenizer=tokenizer,
        row_length=data.sequence_length + 1,
        buffer=data.packing_buffer,
        document_characters=data.document_characters,
    )
    plans: dict[str, list[Shard]] = {}
    for name, of_split in zip(SPLITS, indices, strict=True):
        (folder / name).mkdir()
        most, buffer = data.packing_shards, data.packing_buffer
        plans[name] = plan_shards(folder / name, documents, of_split, most=most, buffer=buffer)
    shards = [shard for plan in plans.values() for shard in plan]
    processes = choose_processes(documents, len(shards))
    with progress_bar("packing", sum(map(len, indices)), enabled=progress) as advance:
        written = iter(write_shards(packer, shards, processes=processes, advance=advance))
    return {
        name: _split_record(folder / name, [next(written) for _ in plan], data)
        for name, plan in plans.items()
    }


def _split_record(folder: Path, written: list[dict[str, Any]], data: DataConfig) -> dict[str, Any]:
    """Sum what `Packer.write` says of a split's shards; refuse a split without a row."""
    row_length = data.sequence_length + 1
    names = ("documents", "tokens", "rows", "cropped", "leftover", "bytes")
    totals = {name: sum(record[name] for record in written) for name in names}
    if totals["rows"] == 0:
        validation = folder.name == "validation"
        remedy = "raise data.validation_fraction" if validation else "give more text"
        raise ValueError(
            f"data.sequence_length: the {folder.name} split has {totals['documents']} documents with "
            f"{totals['tokens']} tokens, too few for one row of {row_length}; {remedy} "
            "or lower data.sequence_length."
        )
    shards = [record["shard"] for record in written]
    rows = open_shards(folder, shards, row_length)
    return totals | {"sha256": rows.fingerprint(), "shards": shards}


def _reopen(data: DataConfig, folder: Path) -> PackedData:
    metadata = _read_metadata(folder)
    now, then = _settings(data), metadata["settings"]
    if now["tokenizer"] is not None and then["tokenizer"] is not None:
        now["tokenizer"] = then["tokenizer"]  # wherever it lies now: `open_packed` compares it
    for name, made in then.items():
        if made != now[name]:
            raise _disagreement(folder, name, made, now[name])
    if data.corpus != "docstrings":
        read, sources = metadata["corpus"]["sources"], corpus_sources(data)
        for path in sorted(read.keys() | sources.keys()):
            if read.get(path) != sources.get(path):
                raise _disagreement(folder, f"files ({path})", read.get(path), sources.get(path))
    return open_packed(folder, tokenizer=data.tokenizer)


def _disagreement(folder: Path, name: str, made: object, now: object) -> ValueError:
    return ValueError(
        f"data.{name}: {folder} was made with {made!r}, asked for now is {now!r}. "
        "Name another folder for the new data, or delete this one to make it again."
    )


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    if not path.is_file():
        state = "isn't finished (no metadata.json)" if folder.exists() else "doesn't exist"
        raise ValueError(
            f"packed data: {folder} {state}; name another folder, or delete it and prepare it again."
        )
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"packed data: {path} is damaged ({error}); restore the file, or delete {folder} and "
            "prepare it again."
        ) from error
    found = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(
            f"packed data: {path} has schema_version {found}, this version of hf-looped reads "
            f"{SCHEMA_VERSION}; delete {folder} and prepare it again."
        )
    return metadata


def _open_split(folder: Path, name: str, metadata: Mapping[str, Any]) -> Rows:
    split = metadata["splits"][name]
    rows = open_shards(folder / name, split["shards"], metadata["sequence_length"] + 1)
    if len(rows) != split["rows"]:
        raise ValueError(
            f"packed data: {folder / 'metadata.json'} says {split['rows']} rows for {name}, its "
            f"shards hold {len(rows)}; restore the file, or delete {folder} and prepare it again."
        )
    return rows
