"""How a model's parameters are divided into N_once and N_rec.

A choice that moves φ by 0.03, and therefore stands in every report. Symbols: d hidden size, r
recurrences, N parameters (count). Source: Schwethelm et al. 2026 (arXiv:2604.21106), section 3.
"""

import numpy as np
import pandas as pd

from ..solver.laws import FloatArray

SPLITS = {
    "text": "n_once and n_rec as they are; n_rec includes the injection (the paper's own "
    "definition)",
    "once": "the injection's parameters count as executed once (n_injection moved from n_rec to "
    "n_once)",
    "regression": (
        "per width, N = n_once + n_rec regressed on shared_depth / r over r: the intercept is "
        "N_once, the slope times "
        "shared_depth / r is N_rec (what the published fit used)"
    ),
}


def split_parameters(
    frame: pd.DataFrame, split: str, *, whole: pd.DataFrame | None = None
) -> tuple[FloatArray, FloatArray]:
    """N_once and N_rec of every row under `split` ("text", "once" or "regression"). [n], [n].

    `whole` is the table that the regression is computed on (default: `frame`), so that a subset
    keeps the split of its table. Raises ValueError when a column is missing, a width has a single
    r, or a split is not positive.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, but must be one of {', '.join(SPLITS)}.")
    n_once = frame["n_once"].to_numpy(dtype=float)
    n_rec = frame["n_rec"].to_numpy(dtype=float)
    if split == "text":
        return n_once, n_rec
    if split == "once":
        (injection,) = _columns(frame, split, "n_injection")
        return n_once + injection, n_rec - injection
    return _regression(frame, frame if whole is None else whole)


def _columns(frame: pd.DataFrame, split: str, *names: str) -> list[FloatArray]:
    source = frame.attrs.get("source", "the run table")
    out = []
    for name in names:
        if name not in frame:
            raise ValueError(
                f"{source}: column {name} is missing, but --split {split} needs it. Add it, or use "
                "--split text."
            )
        values = frame[name].to_numpy(dtype=float)
        if np.isnan(values).any():
            row = int(np.flatnonzero(np.isnan(values))[0])
            raise ValueError(
                f"{source}, run {frame['run_id'].iloc[row]}: {name} is missing (NaN), but --split "
                f"{split} needs it. "
                "Fill it in, or use --split text."
            )
        out.append(values)
    return out


def _groups(frame: pd.DataFrame) -> tuple[list[tuple[float, ...]], FloatArray]:
    """Key of every row's regression (width.

    Executed depth where the table has it) and its abscissa.
    """
    width, depth = _columns(frame, "regression", "hidden_size", "shared_depth")
    keys = [width]
    if "effective_depth" in frame:
        keys.append(frame["effective_depth"].fillna(-1).to_numpy(dtype=float))
    return list(zip(*keys, strict=True)), depth / frame["recurrences"].to_numpy(dtype=float)


def _regression(frame: pd.DataFrame, whole: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Least squares of N on shared_depth/r through the distinct architectures of each width."""
    source = frame.attrs.get("source", "the run table")
    keys, x = _groups(whole)
    n = whole["n_once"].to_numpy(dtype=float) + whole["n_rec"].to_numpy(dtype=float)
    architectures: dict[tuple[float, ...], set[tuple[float, float]]] = {}
    for key, depth, count in zip(keys, x, n, strict=True):
        architectures.setdefault(key, set()).add((float(depth), float(count)))
    lines: dict[tuple[float, ...], tuple[float, float]] = {}
    for key, points in architectures.items():
        depths, counts = (np.array(values) for values in zip(*sorted(points), strict=True))
        if len(set(depths)) < 2:
            raise ValueError(
                f"{source}: width {key[0]:g} has runs of a single shared_depth / r = "
                f"{depths[0]:g}, but --split regression "
                "needs at least two different r at every width. Add runs, leave the width out, or "
                "use --split text."
            )
        centred = depths - depths.mean()
        slope = float(centred @ (counts - counts.mean()) / (centred @ centred))
        intercept = float(counts.mean() - slope * depths.mean())
        intercept = 0.0 if abs(intercept) < 1e-9 * counts.max() else intercept  # rounding
        if slope <= 0 or intercept < 0:
            raise ValueError(
                f"{source}: width {key[0]:g} gives N_once = {intercept:.4g} and {slope:.4g} "
                "parameters per shared layer, "
                "but --split regression needs both positive. Check n_once, n_rec and shared_depth, "
                "or use --split text."
            )
        lines[key] = (intercept, slope)
    own_keys, own_x = _groups(frame)
    absent = next((key for key in own_keys if key not in lines), None)
    if absent is not None:
        raise ValueError(
            f"{source}: width {absent[0]:g} is not in the table that the regression is computed "
            "on. Add it there."
        )
    intercepts, slopes = (np.array([lines[key][k] for key in own_keys]) for k in (0, 1))
    return intercepts, slopes * own_x
