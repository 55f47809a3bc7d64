"""Losses by (run_id, test_recurrences): one row for every number of recurrences a run was tested at.

Columns: run_id, test_recurrences (T), a loss in nats per token and the mean recurrence in training,
which for models trained at one r is the run table's column recurrences.
"""

import numpy as np
import pandas as pd


def source_of(frame: pd.DataFrame) -> str:
    """Name of the table, for messages."""
    return str(frame.attrs.get("source", "the test-time table"))


def checked_points(frame: pd.DataFrame, loss: str, mu: str) -> pd.DataFrame:
    """Return run_id, mu, test_recurrences and loss, by run in the table's order, then T.

    `loss` names the column of losses, nats per token, `mu` that of the mean trained recurrence.
    Raises ValueError naming row, run, column, value, rule and remedy.
    """
    source = source_of(frame)
    for name in ("run_id", "test_recurrences", loss, mu):
        if name not in frame:
            raise ValueError(
                f"{source}: column {name} is missing (needed: run_id, test_recurrences, {loss} and "
                f"{mu}, the mean trained recurrence). Add it, or name the columns that hold them."
            )
    if frame.empty:
        raise ValueError(f"{source}: the table has no rows. Write one row per run and T.")
    points = pd.DataFrame({"run_id": frame["run_id"].astype(str).to_numpy()})
    for name, column in (("mu", mu), ("test_recurrences", "test_recurrences"), ("loss", loss)):
        values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=float)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{source}, row {row + 1} (run {points['run_id'].iloc[row]}): {column} is "
                f"{frame[column].iloc[row]}, but must be a positive, finite number. Correct it, or "
                "leave the row out."
            )
        points[name] = values
    twice = points.duplicated(["run_id", "test_recurrences"])
    if twice.any():
        again = points[twice].iloc[0]
        raise ValueError(
            f"{source}: run {again['run_id']} has test_recurrences = {again['test_recurrences']:g} twice, "
            "but (run_id, test_recurrences) is the key. Remove one of the rows."
        )
    several = points.groupby("run_id", sort=False)["mu"].nunique()
    if (several > 1).any():
        run = several.index[several > 1][0]
        raise ValueError(
            f"{source}: run {run} has {several[run]} values of {mu}, but a run was trained with one "
            "mean recurrence. Give its rows the same value, or different run_ids."
        )
    order = {run: k for k, run in enumerate(dict.fromkeys(points["run_id"]))}
    points["order"] = points["run_id"].map(order)
    points = points.sort_values(["order", "test_recurrences"], kind="stable")
    return points.drop(columns="order").reset_index(drop=True)
