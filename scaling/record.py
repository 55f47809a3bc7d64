"""Results as JSON and back: frozen dataclasses of numbers, tuples and tables, without loss.

Strict JSON has no NaN and no infinities: they become null in `plain`, which is for readers, and
the strings "nan", "inf", "-inf" in `Record.to_json`, which `Record.from_json` reads again.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from dacite import Config, DaciteError, from_dict


class Record:
    """A result that can be written as JSON text and read again."""

    def to_json(self) -> str:
        """All fields as one JSON object; floats keep every bit."""
        return json.dumps(_values(self, _spelled), ensure_ascii=False, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            return from_dict(cls, json.loads(text), _CONFIG)
        except (json.JSONDecodeError, DaciteError, TypeError, KeyError) as error:
            raise ValueError(
                f"the text holds no {cls.__name__} ({error}). Give what {cls.__name__}.to_json wrote."
            ) from error


def plain(value: Any) -> Any:
    """Python values only, with None for what is not finite."""
    return _values(value, lambda number: None)


def _values(value: Any, odd: Callable[[float], Any]) -> Any:
    """Turn dataclasses into objects, tables into lists of rows, arrays into lists; `odd` spells what JSON lacks."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _values(getattr(value, one.name), odd) for one in fields(value)}
    if isinstance(value, pd.DataFrame):
        return _values(value.astype(object).to_dict("records"), odd)
    if isinstance(value, dict):
        return {str(key): _values(item, odd) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_values(item, odd) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _values(value.tolist(), odd)
    if value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return odd(value)
    return value


def _spelled(number: float) -> str:
    return str(number)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str | int) and not isinstance(value, bool) else value


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table; a column of numbers and "nan" becomes a column of numbers."""
    frame = pd.DataFrame.from_records(rows)
    for name in frame.columns:
        spelled = frame[name].isin(["nan", "inf", "-inf"])
        if spelled.any() and all(isinstance(x, float | int) for x in frame.loc[~spelled, name]):
            frame[name] = frame[name].astype(float)
    return frame


_CONFIG = Config(
    type_hooks={
        float: _number,
        pd.DataFrame: _frame,
    },
    cast=[tuple],
)
