"""Architectures of a table: runs that differ in width, budget and seed alone.

A table may hold several effective depths (executed layers) at one width: at each r these are
different architectures. Where the depth changes with the width it belongs to the architecture's
scaling and divides nothing.
"""

from collections.abc import Iterator

import pandas as pd


def by_architecture(runs: pd.DataFrame) -> Iterator[tuple[int, float | None, pd.DataFrame]]:
    """Yield r, effective depth and the runs of each architecture, by r, then depth.

    The depth is None where the table has none or where it changes with the width. `runs` as in
    `table.RunTable.runs`.
    """
    depths = effective_depths(runs)
    for _, same_r in runs.groupby("r", sort=True):
        r = int(same_r["r"].iloc[0])
        if len(depths) < 2:
            yield r, _only_depth(same_r), same_r
            continue
        for depth, group in same_r.groupby("effective_depth", sort=True, dropna=False):
            yield r, None if pd.isna(depth) else float(str(depth)), group


def effective_depths(runs: pd.DataFrame) -> list[float]:
    """List the depths that divide a table: those that share a width and an r with another one."""
    if "effective_depth" not in runs or "hidden_size" not in runs:
        return []
    per_width = runs.groupby(["r", "hidden_size"])["effective_depth"].nunique(dropna=False)
    if per_width.empty or per_width.max() < 2:
        return []
    return sorted(float(depth) for depth in runs["effective_depth"].dropna().unique())


def _only_depth(runs: pd.DataFrame) -> float | None:
    if "effective_depth" not in runs or runs["effective_depth"].nunique(dropna=False) != 1:
        return None
    depth = runs["effective_depth"].iloc[0]
    return None if pd.isna(depth) else float(depth)


def architecture_name(r: int, effective_depth: float | None) -> str:
    """Name an architecture in a message.

    >>> architecture_name(4, 20.0), architecture_name(2, None)
    ('r = 4, effective depth 20', 'r = 2')
    """
    depth = "" if effective_depth is None else f", effective depth {effective_depth:g}"
    return f"r = {r}{depth}"
