"""The run table: one row a run, read, collected from run directories, checked and written.

Columns needed by every fit: run_id, recurrences, n_once, n_rec (parameter counts), tokens and a
loss in nats per token (val_loss). Further columns are used where present and pass through
otherwise; README and `python -m scaling check` say which fit needs which. A missing status means
finished.
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .checks import refuse_bad_runs

SCHEMA_VERSION = 1
NEEDED = ("run_id", "recurrences", "n_once", "n_rec", "tokens")
ORDER = ("budget_flops", "variant", "recurrences", "hidden_size", "seed", "run_id")
_SUFFIXES = (".csv", ".jsonl", ".parquet")


def read_table(
    path: str | os.PathLike[str],
    *,
    loss: str = "val_loss",
    loss_unit: str = "nats",
    drop: Sequence[str] = (),
    variant: str | None = None,
) -> pd.DataFrame:
    """Read and validate a run table, or a directory of run directories.

    CSV, JSON lines or Parquet, by extension. `loss` names the column that will be fitted;
    `loss_unit` "bits" converts val_loss and every loss/… column to nats; `drop` removes runs by
    run_id and `variant` keeps one variant (as in `prepare`) before anything is checked. Unknown
    columns pass through. Raises ValueError naming file, row, column, value, rule and remedy (see
    `checks.refuse_bad_runs`).
    """
    source = Path(path)
    frame = collect_runs(source) if source.is_dir() else read_raw(source)
    frame = prepare(frame, loss_unit=loss_unit, drop=drop, variant=variant)
    refuse_bad_runs(frame, loss=loss)
    return frame


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
    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        return pd.read_csv(path, dtype={"run_id": "string"}, low_memory=False)
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed. Install it, or use CSV."
        ) from error
    except (ValueError, OSError) as error:  # the parsers raise ValueErrors
        kind = path.suffix[1:].lower()
        raise ValueError(
            f"{path}: cannot be read as {kind} ({error}). Write the table again."
        ) from error


def _read_jsonl(path: Path) -> pd.DataFrame:
    records = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}). Write the table again.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}). One JSON object a line."
            ) from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}, line {number}: {type(record).__name__}, not an object. One JSON object a "
                "line."
            )
        records.append(record)
    return pd.DataFrame.from_records(records)


def prepare(
    frame: pd.DataFrame,
    *,
    loss_unit: str = "nats",
    drop: Sequence[str] = (),
    variant: str | None = None,
) -> pd.DataFrame:
    """Convert losses to nats per token, leave out the runs in `drop`, keep one `variant`.

    A variant without runs of r = 1 keeps those of the other variants: unlooped runs have no loop to
    vary. An unknown run_id or variant is refused.
    """
    source = frame.attrs.get("source", "the run table")
    if loss_unit not in ("nats", "bits"):
        raise ValueError(f"loss_unit is {loss_unit!r}, but must be 'nats' or 'bits' (per token).")
    if drop:
        known = set(frame["run_id"].astype(str)) if "run_id" in frame else set()
        unknown = [run_id for run_id in drop if run_id not in known]
        if unknown:
            raise ValueError(
                f"{source}: --drop names {unknown[0]!r}, but no row has that run_id. Check the "
                "spelling."
            )
        frame = frame[~frame["run_id"].astype(str).isin(list(drop))]
    frame = _of_variant(frame, variant, str(source)).copy()
    frame.attrs["source"] = source
    if loss_unit == "bits":
        for column in [
            name for name in frame.columns if name == "val_loss" or str(name).startswith("loss/")
        ]:
            values = pd.to_numeric(frame[column], errors="coerce")
            if (
                values.notna().sum() == frame[column].notna().sum()
            ):  # strings stay, for the check to name them
                frame[column] = values * math.log(2.0)
    return frame


def _of_variant(frame: pd.DataFrame, variant: str | None, source: str) -> pd.DataFrame:
    if variant is None:
        return frame
    known = sorted(frame["variant"].dropna().astype(str).unique()) if "variant" in frame else []
    if variant not in known:
        raise ValueError(
            f"{source}: --variant is {variant!r}, but the table's variants are "
            f"{', '.join(known) or 'not named (no column variant)'}. Choose one of them."
        )
    own, unlooped = frame["variant"].astype(str) == variant, frame["recurrences"] == 1
    return frame[own if (own & unlooped).any() else own | unlooped]


def collect_runs(root: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the records of all run directories below `root`, `root/*/run.json`.

    The flat keys of `evaluation.json` beside a record are added to it; a key that the record
    has already keeps its value unless that is null. Runs of every status are kept. Rows come in
    a fixed order (budget_flops, variant, recurrences, hidden_size, seed, run_id), columns in
    the order they first appear there. Raises ValueError when no run is found or a file is not
    one JSON object.
    """
    root = Path(root)
    paths = sorted(root.glob("*/run.json"))
    if not paths:
        raise ValueError(
            f"{root}: no */run.json found. Give the directory that holds the run directories."
        )
    records = []
    for path in paths:
        record = {key: _flat(value) for key, value in _read_object(path).items()}
        beside = path.with_name("evaluation.json")
        extra = _read_object(beside) if beside.is_file() else {}
        for key, value in extra.items():
            if record.get(key) is None and not isinstance(value, dict | list):
                record[key] = value
        records.append(record)
    records.sort(key=_order_key)
    frame = pd.DataFrame.from_records(records)
    frame.attrs["source"] = str(root)
    return frame


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not JSON ({error}). Run it again, or remove its directory."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path}: holds a {type(value).__name__}, but must hold one JSON object. Run it again."
        )
    return value


def _flat(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _order_key(record: dict[str, Any]) -> tuple[tuple[int, float, str], ...]:
    def one(value: Any) -> tuple[int, float, str]:
        if value is None:
            return (2, 0.0, "")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (0, float(value), "")
        return (1, 0.0, str(value))

    return tuple(one(record.get(key)) for key in ORDER)


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


def is_finished(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Mark the runs that a fit may use: status finished or missing."""
    if "status" not in frame:
        return pd.Series(True, index=frame.index)
    status = frame["status"]
    return (
        status.isna() | (status.astype(str).str.strip().str.lower().isin(["finished", ""]))
    ).astype(bool)


def left_out(frame: pd.DataFrame) -> dict[str, int]:
    """How many runs of each other status (running, failed, diverged) a fit leaves out."""
    if "status" not in frame:
        return {}
    counts = frame.loc[~is_finished(frame), "status"].astype(str).value_counts()
    return {str(status): int(count) for status, count in sorted(counts.items())}
