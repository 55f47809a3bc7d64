"""Packed data: a corpus split by document, tokenised and packed once, read by every run of a grid.

A folder holds `train.parquet` and `validation.parquet` (column input_ids, rows of T + 1 tokens),
`tokenizer/` and `metadata.json`, which says how they were made. It is written beside its place
and renamed when complete, so that a folder that is there is finished. `cache/` appears at the
first opening: the rows as Arrow files, memory-mapped.
"""

import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from numpy.typing import ArrayLike, NDArray
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .corpus import Corpus, corpus_sources, cut_document, load_corpus, progress_bar, quiet_datasets
from .packing import PackingCounts, Row, pack
from .tokenizer import load_tokenizer, tokenizer_fingerprint, train_tokenizer

SCHEMA_VERSION = 1
SPLITS = ("train", "validation")
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
)


class Rows:
    """Rows of one split, memory-mapped: `rows[indices]` gives int32 [n, T + 1] for indices [n]."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset = dataset.with_format("numpy")

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.dataset)

    def __getitem__(self, indices: ArrayLike) -> NDArray[np.int32]:
        """Read rows. [n] → [n, T + 1]."""
        wanted = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        return np.asarray(self.dataset[wanted]["input_ids"], dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """An open folder of packed data.

    `metadata` is metadata.json: settings, corpus (fingerprint, sources), tokenizer (sha256,
    vocab_size, bos_token_id), versions, sequence_length, and per split documents, bytes (UTF-8,
    of the documents), tokens (of the documents, BOS included), rows, cropped and leftover tokens,
    and the SHA-256 over the rows.
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
    refuse, for a split too small for one row, and for a folder made with other settings. Package
    versions that changed since are no other settings: the rows stay as they are, with the
    versions they were made from in the metadata.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists() and any(folder.iterdir()):
            return _reopen(data, folder)
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        try:
            _write(data, partial, progress=progress)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        packed = open_packed(folder)
        if progress:
            _say_how_much_is_kept(packed)
        return packed


def _say_how_much_is_kept(packed: PackedData) -> None:
    split = packed.metadata["splits"]["train"]
    Console(stderr=True).print(
        f"{split['rows']:,} rows of {packed.sequence_length} tokens for training; best-fit packing cropped "
        f"{split['cropped'] / split['tokens']:.0%} of the documents' tokens",
        highlight=False,
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
    corpus = load_corpus(data, cache_dir=folder / "corpus-cache", progress=progress)
    places = dict(
        zip(SPLITS, split_documents(corpus.documents, data.validation_fraction), strict=True)
    )
    splits = {name: corpus.documents.select(indices) for name, indices in places.items()}
    if len(splits["train"]) == 0:
        raise ValueError(
            f"data.corpus: {data.corpus!r} has {len(corpus.documents)} document(s), all of them "
            f"taken for validation (data.validation_fraction = {data.validation_fraction}); "
            "give at least two documents (in text files, blank lines part them)."
        )
    tokenizer = _make_tokenizer(data, splits["train"], progress=progress)
    tokenizer.save_pretrained(folder / "tokenizer")
    records = {
        name: _write_split(data, split, tokenizer, folder / f"{name}.parquet", progress=progress)
        for name, split in splits.items()
    }
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
    shutil.rmtree(folder / "corpus-cache", ignore_errors=True)
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def _corpus_record(corpus: Corpus) -> dict[str, Any]:
    return {
        "fingerprint": corpus.fingerprint,
        "documents": len(corpus.documents),
        "dropped": corpus.dropped,
        "sources": corpus.sources,
    }


def _make_tokenizer(
    data: DataConfig, documents: datasets.Dataset, *, progress: bool
) -> PreTrainedTokenizerBase:
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    with progress_bar("training tokenizer", len(documents), enabled=progress) as advance:
        return train_tokenizer(_texts(documents, advance), data.vocab_size)


def _texts(documents: datasets.Dataset, advance: Any) -> Iterator[str]:
    for batch in documents.iter(batch_size=1000):
        yield from batch["text"]
        advance(len(batch["text"]))


def _write_split(
    data: DataConfig,
    documents: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    progress: bool,
) -> dict[str, Any]:
    """Tokenise and pack `documents` into the Parquet file `path`; returns the split's record."""
    counts, digest, size = PackingCounts(), hashlib.sha256(), 0

    def tokenised() -> Iterator[list[int]]:
        nonlocal size
        for batch in documents.iter(batch_size=500):
            size += sum(len(text.encode("utf-8", "surrogatepass")) for text in batch["text"])
            parts = [
                part
                for text in batch["text"]
                for part in cut_document(text, data.document_characters)
            ]
            # A special token spelled out in a text is text: BOS stands in front of documents only.
            yield from tokenizer(
                parts,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                verbose=False,  # no warning about documents longer than the model's context
            )["input_ids"]
            advance(len(batch["text"]))

    row_length = data.sequence_length + 1
    schema = pa.schema([("input_ids", pa.list_(pa.int32(), row_length))])
    with (
        progress_bar(f"packing {path.stem}", len(documents), enabled=progress) as advance,
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
    ):
        rows = pack(
            tokenised(),
            row_length=row_length,
            bos_token_id=int(tokenizer.bos_token_id),
            buffer=data.packing_buffer,
            counts=counts,
        )
        for block in _blocks(rows, 1024):
            digest.update(block.astype("<i4").tobytes())
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), row_length)
            writer.write_table(pa.table([values], schema=schema))
    if counts.rows == 0:
        remedy = "raise data.validation_fraction" if path.stem == "validation" else "give more text"
        raise ValueError(
            f"data.sequence_length: the {path.stem} split has {counts.documents} documents with "
            f"{counts.tokens} tokens, too few for one row of {row_length}; {remedy} "
            "or lower data.sequence_length."
        )
    return {**asdict(counts), "bytes": size, "sha256": digest.hexdigest()}


def _blocks(rows: Iterator[Row], size: int) -> Iterator[NDArray[np.int32]]:
    while block := list(islice(rows, size)):
        yield np.stack(block)


def _reopen(data: DataConfig, folder: Path) -> PackedData:
    metadata = _read_metadata(folder)
    now = _settings(data)
    for name, made in metadata["settings"].items():
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
    metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = metadata.get("schema_version")
    if found != SCHEMA_VERSION:
        raise ValueError(
            f"packed data: {path} has schema_version {found}, this version of hf-looped reads "
            f"{SCHEMA_VERSION}; delete {folder} and prepare it again."
        )
    return metadata


def _open_split(folder: Path, name: str, metadata: Mapping[str, Any]) -> Rows:
    path, recorded = folder / f"{name}.parquet", metadata["splits"][name]["rows"]
    found = pq.read_metadata(path).num_rows if path.is_file() else None
    if found != recorded:
        raise ValueError(
            f"packed data: {path} has {found} rows, metadata.json says {recorded}; "
            f"delete {folder} and prepare it again."
        )
    with quiet_datasets():
        return Rows(datasets.Dataset.from_parquet(str(path), cache_dir=str(folder / "cache")))
