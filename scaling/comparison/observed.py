"""What the runs themselves say of a variant, before any law: loss and tokens at equal settings."""

from dataclasses import dataclass

import pandas as pd

from ..record import Record
from .pairing import Pair


@dataclass(frozen=True, kw_only=True)
class Observed(Record):
    """Runs of both tables at equal budget, r and width, no law involved (means over seeds).

    loss_change: mean of variant − baseline, nats; n_lower: settings where the variant is lower.
    tokens_ratio: median of variant / baseline.
    """

    r: int
    n_settings: int
    n_lower: int
    loss_change: float
    tokens_ratio: float


def observed(pair: Pair) -> tuple[Observed, ...]:
    """Compare the runs that have a counterpart, per r; the unlooped ones only where not reused."""
    tables = (pair.baseline.runs, pair.variant.runs)
    if not all("hidden_size" in runs for runs in tables):
        return ()
    keys = ["budget_flops", "r", "hidden_size"]
    if all("effective_depth" in runs for runs in tables):
        keys.append("effective_depth")
    means = [
        runs.groupby(keys)[["loss", "tokens"]].mean().add_suffix(suffix)
        for runs, suffix in zip(tables, ("_baseline", "_variant"), strict=True)
    ]
    both = means[0].join(means[1], how="inner")
    out = []
    for value, group in both.groupby(level="r"):
        r = int(value)  # type: ignore[call-overload]
        if r == 1 and pair.n_reused:
            continue
        change: pd.Series[float] = group["loss_variant"] - group["loss_baseline"]
        out.append(
            Observed(
                r=r,
                n_settings=len(group),
                n_lower=int((change < 0).sum()),
                loss_change=float(change.mean()),
                tokens_ratio=float((group["tokens_variant"] / group["tokens_baseline"]).median()),
            )
        )
    return tuple(out)
