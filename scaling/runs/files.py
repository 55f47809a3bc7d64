"""The run table: one row a run, read, collected from run directories and checked.

Columns needed by every fit: run_id, recurrences, n_once, n_rec (parameter counts), tokens and a
loss in nats per token (val_loss). Further columns are used where present and pass through
otherwise; README and `python -m scaling check` say which fit needs which. A missing status means
finished.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .checks import refuse_bad_runs
from .formats import read_raw

SCHEMA_VERSION = 1
NEEDED = ("run_id", "recurrences", "n_once", "n_rec", "tokens")
ORDER = ("budget_flops", "variant", "recurrences", "hidden_size", "seed", "run_id")


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


def prepare(
    frame: pd.DataFrame,
    *,
    loss_unit: str = "nats",
    drop: Sequence[str] = (),
    variant: str | None = None,
) -> pd.DataFrame:
    """Convert losses to nats per token, leave out the runs in `drop`, keep one `variant`.

    A variant without runs of r = 1 keeps those of the other variants: unlooped runs have no loop to
    vary. An unknown run_id or variant is refused. `loss_unit` goes to `frame.attrs`, for reports.
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
    frame.attrs["loss_unit"] = loss_unit
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
    own = frame["variant"].astype(str) == variant
    unlooped = frame["recurrences"] == 1 if "recurrences" in frame else ~own
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
        record = {key: _flat(value) for key, value in read_object(path).items()}
        beside = path.with_name("evaluation.json")
        extra = read_object(beside) if beside.is_file() else {}
        for key, value in extra.items():
            if record.get(key) is None and not isinstance(value, dict | list):
                record[key] = value
        records.append(record)
    records.sort(key=_order_key)
    frame = pd.DataFrame.from_records(records)
    frame.attrs["source"] = str(root)
    return frame


def read_object(path: Path) -> dict[str, Any]:
    """Read a run's record or what stands beside it: one JSON object, else ValueError."""
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
