"""Numbers of a run table: what a finished run's columns may hold.

Columns are checked whole; a value that doesn't pass is looked at by itself and named.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from ..solver.laws import FloatArray

_COUNT = 1e18  # more parameters or tokens than anything has
_FLOPS = 1e36


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a number must be: positive (or zero), whole, at most `most`. Optional ones may be absent."""

    most: float
    least: float = 0.0
    zero: bool = False
    whole: bool = False
    optional: bool = False


RULES = {
    "recurrences": Rule(most=1e6, whole=True),
    "n_once": Rule(most=_COUNT, zero=True),
    "n_rec": Rule(most=_COUNT, zero=True),
    "tokens": Rule(most=_COUNT),
    "n_injection": Rule(most=_COUNT, zero=True, optional=True),
    "budget_flops": Rule(most=_FLOPS, optional=True),
    "hidden_size": Rule(most=1e9, whole=True, optional=True),
    "shared_depth": Rule(most=1e6, optional=True),
    "train_flops_per_token": Rule(most=_FLOPS, optional=True),
    "vocab_size": Rule(most=1e9, whole=True, optional=True),
    "seed": Rule(most=2.0**64, zero=True, whole=True, optional=True),
}
LOSS = Rule(most=1e6, least=1e-6)


def refuse_bad_numbers(runs: pd.DataFrame, places: pd.Series, loss: str) -> dict[str, FloatArray]:
    """Raise ValueError at the first run whose numbers break a rule; else return the columns. [n] each.

    `places` names file, row and run of every row, for messages. NaN where an optional number is
    absent.
    """
    rules = {**RULES, loss: LOSS}
    columns = {
        name: _floats(runs[name]) for name in rules if name in runs or not rules[name].optional
    }
    passed = {name: _passes(values, rules[name]) for name, values in columns.items()}
    for name in columns:
        if rules[name].optional:
            passed[name] |= runs[name].isna().to_numpy(dtype=bool)
    for row in np.flatnonzero(~np.logical_and.reduce(list(passed.values()))):
        for name in columns:
            if not passed[name][row]:
                drop = f"to leave the run out: --drop {runs['run_id'].iloc[row]}"
                columns[name][row] = _number(
                    f"{places.iloc[row]}: {name}", runs[name].iloc[row], rules[name], drop
                )
    _refuse_bad_sizes(runs, columns, places, loss)
    return columns


def absent(value: Any) -> bool:
    """Whether a cell of a table holds nothing."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def shown(value: Any) -> str:
    """Write a cell as Python does, numpy's scalars as the plain values they are."""
    return repr(value.item() if isinstance(value, np.generic) else value)


def _floats(column: pd.Series) -> FloatArray:
    """Read a column as numbers, NaN where that isn't certain."""
    nothing = np.full(len(column), np.nan)
    if types.is_bool_dtype(column.dtype):
        return nothing
    if types.is_numeric_dtype(column.dtype):
        return column.to_numpy(dtype=float, na_value=np.nan).copy()
    if not (types.is_object_dtype(column.dtype) or types.is_string_dtype(column.dtype)):
        return nothing
    text = column.astype(object)
    known = text.map(lambda value: isinstance(value, str | int | float | np.number))
    known &= ~text.map(lambda value: isinstance(value, bool | np.bool_))
    found = pd.to_numeric(text.where(known), errors="coerce")
    return found.to_numpy(dtype=float, na_value=np.nan).copy()


def _passes(values: FloatArray, rule: Rule) -> Any:
    fine = (values >= rule.least) & (values <= rule.most)
    if not rule.zero:
        fine &= values > 0
    if rule.whole:
        fine &= values == np.floor(values)
    return fine


def _number(what: str, value: Any, rule: Rule, drop: str) -> float:
    """Read one value, or refuse it by name."""
    if absent(value):
        raise ValueError(
            f"{what} is missing (NaN), but every finished run needs it. Fill it in; {drop}."
        )
    try:
        number = math.nan if isinstance(value, bool | np.bool_) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number) or isinstance(value, pd.Timedelta | pd.Timestamp | np.ndarray):
        raise ValueError(f"{what} is {shown(value)}, which is not a number. Correct it; {drop}.")
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, but must be finite. Correct it; {drop}.")
    if number < 0 or (number == 0 and not rule.zero):
        wanted = "at least 0" if rule.zero else "positive"
        raise ValueError(f"{what} is {number:g}, but must be {wanted}. Correct it; {drop}.")
    if rule.whole and number != math.floor(number):
        raise ValueError(f"{what} is {number:g}, but must be a whole number. Correct it; {drop}.")
    if not rule.least <= number <= rule.most:
        between = (
            f"between {rule.least:g} and {rule.most:g}" if rule.least else f"at most {rule.most:g}"
        )
        raise ValueError(
            f"{what} is {number:g}, but must be {between} to be believed. Check its unit; {drop}."
        )
    return number


def _refuse_bad_sizes(
    runs: pd.DataFrame, columns: Mapping[str, FloatArray], places: pd.Series, loss: str
) -> None:
    """Refuse runs whose numbers contradict one another."""
    once, rec = columns["n_once"], columns["n_rec"]
    injection = columns.get("n_injection", np.zeros(len(runs)))
    ceiling = np.log(columns.get("vocab_size", np.full(len(runs), np.nan)))

    def refuse(bad: NDArray[np.bool_], why: Callable[[int], str]) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"{places.iloc[row]}: {why(row)}; to leave the run out: --drop "
                f"{runs['run_id'].iloc[row]}."
            )

    refuse(
        once + rec <= 0,
        lambda row: "n_once + n_rec is 0, but a model has parameters. Correct them",
    )
    refuse(
        injection > rec,
        lambda row: (
            f"n_injection is {injection[row]:g}, above n_rec = {rec[row]:g}, but n_rec "
            "includes the injection. Add it to n_rec"
        ),
    )
    if loss == "val_loss":
        refuse(
            columns[loss] > ceiling,
            lambda row: (
                f"{loss} is {columns[loss][row]:.3g} nats, above log(vocab_size) = "
                f"{ceiling[row]:.3g}. Losses are nats per token (--loss-unit bits converts)"
            ),
        )
