"""What a run table must hold before anything is fitted.

Every refusal names file, row, column, value, rule and remedy. Only finished runs need valid
numbers: running, failed and diverged rows are left out of fits and counted.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..solver.laws import FloatArray
from .numbers import RULES, absent, refuse_bad_numbers, shown

_STATUSES = ("running", "finished", "failed", "diverged")
_ONE_BUDGET = 0.01  # budgets nearer than this (relative) are taken for one, rounded differently
_SAME_RUN = (
    "variant", "seed", "budget_flops", "hidden_size", "recurrences", "n_once", "n_rec", "tokens",
)  # fmt: skip
_VARIANT = ("variant", "injection", "backprop_recurrences")


def refuse_bad_runs(frame: pd.DataFrame, *, loss: str = "val_loss") -> None:
    """Raise ValueError at the first thing that makes the table unfit for fits of column `loss`.

    Checked: needed columns, names that occur twice, at least one finished run, schema version,
    status names, unique run_id, numbers of finished runs (`numbers.RULES`), losses above
    log(vocab_size), duplicate runs, budgets that differ by rounding, one validation set, one
    training recipe, one variant per r.
    """
    source = str(frame.attrs.get("source", "the run table"))
    needed = [name for name, rule in RULES.items() if not rule.optional]
    _refuse_bad_columns(source, frame, needed, loss)
    if frame.empty:
        raise ValueError(f"{source}: the table has no rows. Write one row a run.")
    runs = frame.reset_index(drop=True)
    _refuse_bad_labels(source, runs)
    finished = is_finished(runs)
    if not finished.any():
        raise ValueError(
            f"{source}: none of its {len(runs)} runs is finished. Wait for the runs, or run them "
            "again."
        )
    runs = runs[finished]
    places = source + ", row " + (runs.index + 1).astype(str).to_series(index=runs.index)
    places += " (run " + runs["run_id"].astype(str) + ")"
    numbers = refuse_bad_numbers(runs, places, loss)
    _refuse_duplicates(runs, places, loss)
    if "budget_flops" in numbers:
        _refuse_rounded_budgets(source, runs, numbers["budget_flops"])
    if loss == "val_loss":
        _refuse_mixed_validation(runs, places)
    _refuse_mixed_recipes(source, runs)


def status_of(row: Mapping[str, Any]) -> str:
    """Status of a row; missing or empty means finished."""
    return _status(row.get("status"))


def is_finished(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Mark the runs that a fit may use: status finished or missing."""
    return _statuses(frame) == "finished"


def left_out(frame: pd.DataFrame) -> dict[str, int]:
    """How many runs of each other status (running, failed, diverged) a fit leaves out."""
    counts = _statuses(frame)[lambda status: status != "finished"].value_counts()
    return {str(status): int(count) for status, count in sorted(counts.items())}


def _statuses(frame: pd.DataFrame) -> "pd.Series[str]":
    if "status" not in frame:
        return pd.Series("finished", index=frame.index)
    return frame["status"].astype(object).map(_status)


def _status(value: Any) -> str:
    text = "" if absent(value) else str(value).strip().lower()
    return text or "finished"


def _refuse_bad_columns(source: str, frame: pd.DataFrame, needed: list[str], loss: str) -> None:
    missing = [name for name in ("run_id", *needed, loss) if name not in frame]
    if missing:
        raise ValueError(
            f"{source}: column {missing[0]} is missing (needed: run_id, {', '.join(needed)}, "
            f"{loss}; found: "
            f"{', '.join(str(name) for name in frame.columns) or 'none'}). Add it, or rename the "
            "column that holds it."
        )
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(
            f"{source}: column {twice[0]} is there twice. Keep the one that holds the values."
        )


def _refuse_bad_labels(source: str, runs: pd.DataFrame) -> None:
    names = runs["run_id"].astype(str)
    empty = np.flatnonzero(runs["run_id"].isna() | (names.str.strip() == ""))
    if len(empty):
        raise ValueError(
            f"{source}, row {empty[0] + 1}: run_id is empty. Give every run its own name."
        )

    def place(row: int) -> str:
        return f"{source}, row {row + 1} (run {names[row]})"

    repeated = np.flatnonzero(names.duplicated())
    if len(repeated):
        row = repeated[0]
        raise ValueError(
            f"{place(row)}: run_id was already used in row {np.flatnonzero(names == names[row])[0] + 1}. "
            "Every run needs its own run_id; remove the repeated row or rename it."
        )
    unknown = np.flatnonzero(~_statuses(runs).isin(_STATUSES))
    if len(unknown):
        raise ValueError(
            f"{place(unknown[0])}: status is {shown(runs['status'][unknown[0]])}, but must be one of "
            f"{', '.join(_STATUSES)} (empty means finished). Correct it."
        )
    if "schema_version" in runs:
        versions = runs["schema_version"]
        other = np.flatnonzero(versions.notna() & ~versions.astype(str).isin(["1", "1.0"]))
        if len(other):
            raise ValueError(
                f"{place(other[0])}: schema_version is {versions[other[0]]}, but this package "
                "reads version 1. Update the package, or write the table again with it."
            )


def _refuse_duplicates(runs: pd.DataFrame, places: pd.Series, loss: str) -> None:
    keys = [name for name in (*_SAME_RUN, loss) if name in runs]
    settings = runs[keys].astype({name: str for name in keys if runs[name].dtype == object})
    repeated = np.flatnonzero(settings.duplicated())
    if len(repeated):
        row = repeated[0]
        same = settings.groupby(keys, dropna=False, sort=False).ngroup().to_numpy()
        first = runs.index[np.flatnonzero(same == same[row])[0]]
        raise ValueError(
            f"{places.iloc[row]}: the same run as row {first + 1} under another run_id (equal "
            f"variant, seed, budget, sizes, tokens and {loss}). A run must count once: --drop "
            f"{runs['run_id'].iloc[row]} leaves it out; repeats with other seeds need their seed column."
        )


def _refuse_rounded_budgets(source: str, runs: pd.DataFrame, budgets: FloatArray) -> None:
    """Refuse budgets that are one but for rounding: the (budget, r) cells would hold a run each."""
    different = np.unique(budgets[~np.isnan(budgets)])
    near = np.flatnonzero(different[1:] < different[:-1] * (1 + _ONE_BUDGET))
    if len(near):
        low, high = different[near[0]], different[near[0] + 1]
        first, second = (
            runs["run_id"].iloc[int(np.argmax(budgets == value))] for value in (low, high)
        )
        raise ValueError(
            f"{source}: budget_flops is {low} for run {first} and {high} for run {second}, which "
            f"differ by less than {_ONE_BUDGET:.0%}, but runs of one budget must carry the same number: "
            "resampling and iso-FLOPs minima go by it. Write the planned budget for all of them."
        )


def _refuse_mixed_validation(runs: pd.DataFrame, places: pd.Series) -> None:
    if "val_fingerprint" not in runs:
        return
    known = runs["val_fingerprint"].dropna().astype(str)
    known = known[known != ""]
    other = known.index[known != known.iloc[0]] if len(known) else known.index
    if len(other):
        raise ValueError(
            f"{places[other[0]]}: val_fingerprint is {known[other[0]]}, but row {known.index[0] + 1} "
            f"has {known.iloc[0]}: the losses were measured on different validation sets and cannot "
            "be compared. Evaluate all runs on one set."
        )


def _refuse_mixed_recipes(source: str, runs: pd.DataFrame) -> None:
    """Refuse runs that differ in more than the law knows of: another recipe, or two variants at one r."""
    if "recipe_sha256" in runs:
        recipes = runs[runs["recipe_sha256"].notna()].drop_duplicates("recipe_sha256")
        if len(recipes) > 1:
            raise ValueError(
                f"{source}: its runs were trained with {len(recipes)} recipes (recipe_sha256; for "
                f"example {' and '.join(recipes['run_id'].astype(str)[:2])} differ in data, batch or "
                "rates). One law describes one recipe: --drop the others, or keep them in a table of "
                "their own."
            )
    names = [name for name in _VARIANT if name in runs]
    if not names:
        return
    each = runs[["recurrences", *names, "run_id"]].drop_duplicates(["recurrences", *names])
    for r, found in each.groupby("recurrences", sort=False):
        if len(found) > 1:
            described = "; ".join(
                ", ".join(f"{name} {row[name]}" for name in names if not absent(row[name]))
                for _, row in found.iterrows()
            )
            raise ValueError(
                f"{source}: r = {r} has runs of {len(found)} variants ({described}; for example "
                f"{' and '.join(found['run_id'].astype(str)[:2])}). One φ describes one variant: choose "
                "it with --variant NAME, or --drop the others."
            )
