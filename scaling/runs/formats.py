"""Files that hold a run table: CSV, JSON lines, Parquet."""

import csv
import json
import os
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

_SUFFIXES = (".csv", ".jsonl", ".parquet")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def read_raw(path: Path) -> pd.DataFrame:
    """Read a table without checking its values.

    The file's name goes to `frame.attrs["source"]` for messages.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"{path}: the extension {path.suffix!r} is not one of {', '.join(_SUFFIXES)}. Rename "
            "or convert."
        )
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file. Give a run table or a directory of run directories."
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty. Write one header line and one row a run.")
    frame = _read_jsonl(path) if path.suffix.lower() == ".jsonl" else _read_columns(path)
    if "run_id" in frame:
        frame["run_id"] = frame["run_id"].astype(object).where(frame["run_id"].notna(), None)
    frame.attrs["source"] = str(path)
    return frame


def _read_columns(path: Path) -> pd.DataFrame:
    parquet = path.suffix.lower() == ".parquet"
    if not parquet:
        _refuse_bad_header(path)
    try:
        if parquet:
            return pd.read_parquet(path)
        return pd.read_csv(
            path, dtype={"run_id": "string"}, low_memory=False, skipinitialspace=True
        )
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed. Install it, or use CSV."
        ) from error
    except (ValueError, OSError) as error:  # the parsers raise ValueErrors
        kind = path.suffix[1:].lower()
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path}: cannot be read as {kind} ({why}). Write the table again."
        ) from error


def _refuse_bad_header(path: Path) -> None:
    """Refuse what a CSV reader would guess about: encoding, separators, names, surplus fields."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if any("\0" in line for line in lines):
                raise ValueError(
                    f"{path}: holds NUL characters. Write the table again, as UTF-8 text."
                )
            lines.seek(0)
            header, first = [*islice((row for row in csv.reader(lines) if row), 2), [], []][:2]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}). Write the table again, as UTF-8."
        ) from error
    except csv.Error as error:
        raise ValueError(
            f"{path}: cannot be read as csv ({error}). Write the table again."
        ) from error
    if len(header) == 1:
        for separator, name in _OTHER_SEPARATORS.items():
            if separator in header[0]:
                raise ValueError(
                    f"{path}: its columns are separated by {name}, but must be by commas (with a point "
                    "in decimals). Write the table again."
                )
    names = [name.strip() for name in header]
    if "run_id" in names:  # else the first line may hold values
        _refuse_repeated(names, str(path))
    if len(first) > len(header):
        raise ValueError(
            f"{path}: the first run has {len(first)} fields, but the header names {len(header)} columns. "
            "Name every column."
        )


def _refuse_repeated(names: list[str], place: str) -> None:
    repeated = next((name for k, name in enumerate(names) if name and name in names[:k]), None)
    if repeated is not None:
        raise ValueError(f"{place}: {repeated} is there twice. Keep the one that holds the values.")


def _read_jsonl(path: Path) -> pd.DataFrame:
    records = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}). Write the table again.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line, object_pairs_hook=partial(_object, place))
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error}). One JSON object a line.") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{place}: {type(record).__name__}, not an object. One JSON object a line."
            )
        records.append(record)
    return pd.DataFrame.from_records(records)


def _object(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([name for name, _ in pairs], place)
    return dict(pairs)


def write_table(frame: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a run table as CSV, JSON lines or Parquet, by extension.

    It is written beside its destination and moved over it: readers see the old file or the new
    one, never half. Floats survive the round trip bit for bit.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"{path}: the extension {path.suffix!r} is not one of {', '.join(_SUFFIXES)}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        if suffix == ".csv":
            frame.to_csv(temporary, index=False)
        elif suffix == ".jsonl":
            temporary.write_text("".join(_json_lines(frame)), encoding="utf-8")
        else:
            frame.to_parquet(temporary, index=False)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _json_lines(frame: pd.DataFrame) -> list[str]:
    lines = []
    for record in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        plain = {
            str(key): value.item() if hasattr(value, "item") else value
            for key, value in record.items()
        }
        lines.append(json.dumps(plain, ensure_ascii=False) + "\n")
    return lines
