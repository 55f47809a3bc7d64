"""What a run table must hold before anything is fitted.

Every refusal names file, row, column, value, rule and remedy. Only finished runs need a valid
loss: running, failed and diverged rows are left out of fits and counted.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

# column → (may be zero, must be whole); the first five of a fit, the rest only where present
_COUNTS = {
    "recurrences": (False, True),
    "n_once": (True, False),
    "n_rec": (True, False),
    "tokens": (False, False),
}
_OPTIONAL = {
    "n_injection": (True, False),
    "budget_flops": (False, False),
    "hidden_size": (False, True),
    "shared_depth": (False, False),
    "train_flops_per_token": (False, False),
    "vocab_size": (False, True),
}
_STATUSES = ("running", "finished", "failed", "diverged")


def refuse_bad_runs(frame: pd.DataFrame, *, loss: str = "val_loss") -> None:
    """Raise ValueError at the first thing that makes the table unfit for fits of column `loss`.

    Checked: needed columns, at least one finished run, schema version, status names, unique run_id,
    numbers (finite, positive, whole where counts) and losses of finished runs, losses above
    log(vocab_size), duplicate runs, one validation set, one training recipe, one variant per r.
    """
    source = str(frame.attrs.get("source", "the run table"))
    missing = [name for name in ("run_id", *_COUNTS, loss) if name not in frame]
    if missing:
        raise ValueError(
            f"{source}: column {missing[0]} is missing (needed: run_id, {', '.join(_COUNTS)}, "
            f"{loss}; found: "
            f"{', '.join(str(name) for name in frame.columns) or 'none'}). Add it, or rename the "
            "column that holds it."
        )
    if frame.empty:
        raise ValueError(f"{source}: the table has no rows. Write one row a run.")
    rows = [
        dict(zip(frame.columns, values, strict=True))
        for values in frame.itertuples(index=False, name=None)
    ]
    _refuse_bad_labels(source, rows)
    finished = [
        (number, row) for number, row in enumerate(rows, start=1) if status_of(row) == "finished"
    ]
    if not finished:
        raise ValueError(
            f"{source}: none of its {len(rows)} runs is finished. Wait for the runs, or run them "
            "again."
        )
    for number, row in finished:
        _refuse_bad_numbers(source, number, row, loss)
    _refuse_duplicates(source, finished, loss)
    _refuse_mixed_validation(source, finished, loss)
    _refuse_mixed_recipes(source, finished)


def status_of(row: Mapping[str, Any]) -> str:
    """Status of a row; missing or empty means finished."""
    value = row.get("status")
    text = "" if _absent(value) else str(value).strip().lower()
    return text or "finished"


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _place(source: str, number: int, row: Mapping[str, Any]) -> str:
    return f"{source}, row {number} (run {row['run_id']})"


def _refuse_bad_labels(source: str, rows: list[dict[str, Any]]) -> None:
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if _absent(row["run_id"]) or not str(row["run_id"]).strip():
            raise ValueError(
                f"{source}, row {number}: run_id is empty. Give every run its own name."
            )
        run_id = str(row["run_id"])
        if run_id in seen:
            raise ValueError(
                f"{_place(source, number, row)}: run_id was already used in row {seen[run_id]}. "
                "Every run needs its own run_id; remove the repeated row or rename it."
            )
        seen[run_id] = number
        if status_of(row) not in _STATUSES:
            raise ValueError(
                f"{_place(source, number, row)}: status is {row['status']!r}, but must be one of "
                f"{', '.join(_STATUSES)} "
                "(empty means finished). Correct it."
            )
        version = row.get("schema_version")
        if not _absent(version) and str(version) not in ("1", "1.0"):
            raise ValueError(
                f"{_place(source, number, row)}: schema_version is {version}, but this package "
                "reads version 1. "
                "Update the package, or write the table again with it."
            )


def _refuse_bad_numbers(source: str, number: int, row: Mapping[str, Any], loss: str) -> None:
    place, drop = _place(source, number, row), f"to leave the run out: --drop {row['run_id']}"
    for column, (zero, whole) in {**_COUNTS, **_OPTIONAL, loss: (False, False)}.items():
        if column in _OPTIONAL and (column not in row or _absent(row[column])):
            continue
        value = row[column]
        if _absent(value):
            raise ValueError(
                f"{place}: {column} is missing (NaN), but every finished run needs it. Fill it in; "
                f"{drop}."
            )
        if isinstance(value, str | bool | np.bool_) or not isinstance(
            value, int | float | np.number
        ):
            number_or_not = _as_number(value)
            if number_or_not is None:
                raise ValueError(
                    f"{place}: {column} is {value!r}, which is not a number. Correct it; {drop}."
                )
            value = number_or_not
        if not math.isfinite(value):
            raise ValueError(
                f"{place}: {column} is {value}, but must be finite. Correct it; {drop}."
            )
        if value < 0 or (value == 0 and not zero):
            rule = "at least 0" if zero else "positive"
            raise ValueError(
                f"{place}: {column} is {value:g}, but must be {rule}. Correct it; {drop}."
            )
        if whole and value != int(value):
            raise ValueError(
                f"{place}: {column} is {value:g}, but must be a whole number. Correct it; {drop}."
            )
    if float(row["n_once"]) + float(row["n_rec"]) <= 0:
        raise ValueError(
            f"{place}: n_once + n_rec is 0, but a model has parameters. Correct them; {drop}."
        )
    injection = row.get("n_injection")
    if not _absent(injection) and float(injection) > float(row["n_rec"]):  # type: ignore[arg-type]
        raise ValueError(
            f"{place}: n_injection is {float(injection):g}, above n_rec = {float(row['n_rec']):g}, "  # type: ignore[arg-type]
            f"but n_rec includes the injection. Add it to n_rec; {drop}."
        )
    vocabulary = row.get("vocab_size")
    if loss == "val_loss" and not _absent(vocabulary):
        ceiling = math.log(float(vocabulary))  # type: ignore[arg-type]
        if float(row[loss]) > ceiling:
            raise ValueError(
                f"{place}: {loss} is {float(row[loss]):.3g} nats, above log(vocab_size) = "
                f"{ceiling:.3g}. "
                f"Losses are nats per token (--loss-unit bits converts); {drop}."
            )


def _as_number(value: Any) -> float | None:
    """Read a number that was written as text, as in a column that a stray word turned into text."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _refuse_duplicates(source: str, finished: list[tuple[int, dict[str, Any]]], loss: str) -> None:
    keys = (
        "variant",
        "seed",
        "budget_flops",
        "hidden_size",
        "recurrences",
        "n_once",
        "n_rec",
        "tokens",
        loss,
    )
    seen: dict[tuple[str, ...], int] = {}
    for number, row in finished:
        key = tuple(str(row.get(name)) for name in keys)
        if key in seen:
            raise ValueError(
                f"{_place(source, number, row)}: the same run as row {seen[key]} under another "
                "run_id (equal variant, seed, "
                f"budget, sizes, tokens and {loss}). A run must count once: --drop {row['run_id']} "
                "leaves it out; "
                "repeats with other seeds need their seed column."
            )
        seen[key] = number


def _refuse_mixed_validation(
    source: str, finished: list[tuple[int, dict[str, Any]]], loss: str
) -> None:
    if loss != "val_loss":
        return
    first: tuple[int, str] | None = None
    for number, row in finished:
        value = row.get("val_fingerprint")
        if _absent(value) or not str(value):
            continue
        if first is None:
            first = (number, str(value))
        elif str(value) != first[1]:
            raise ValueError(
                f"{_place(source, number, row)}: val_fingerprint is {value}, but row {first[0]} "
                f"has {first[1]}: the losses "
                "were measured on different validation sets and cannot be compared. Evaluate all "
                "runs on one set."
            )


def _refuse_mixed_recipes(source: str, finished: list[tuple[int, dict[str, Any]]]) -> None:
    """Refuse runs that differ in more than the law knows of: another recipe, or two variants at one r."""
    recipes: dict[str, str] = {}
    variants: dict[str, dict[str, str]] = {}
    for _, row in finished:
        recipe = row.get("recipe_sha256")
        if isinstance(recipe, str):
            recipes.setdefault(recipe, str(row["run_id"]))
        names = ("variant", "injection", "backprop_recurrences")
        described = ", ".join(f"{name} {row[name]}" for name in names if not _absent(row.get(name)))
        variants.setdefault(str(row["recurrences"]), {}).setdefault(described, str(row["run_id"]))
    if len(recipes) > 1:
        raise ValueError(
            f"{source}: its runs were trained with {len(recipes)} recipes (recipe_sha256; for "
            f"example {' and '.join(list(recipes.values())[:2])} differ in data, batch or rates). "
            "One law describes one recipe: --drop the others, or keep them in a table of their own."
        )
    for r, found in variants.items():
        if len(found) > 1:
            raise ValueError(
                f"{source}: r = {r} has runs of {len(found)} variants ({'; '.join(found)}; for example "
                f"{' and '.join(list(found.values())[:2])}). One φ describes one variant: choose it with "
                "--variant NAME, or --drop the others."
            )
