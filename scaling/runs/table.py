"""The runs that a fit may use: a checked table with one split applied to all of it.

The split is computed once, on the whole table: subsets, resamples and leave-one-out keep it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from ..solver.laws import FloatArray
from ..solver.objective import Design
from .checks import is_finished, left_out, refuse_bad_runs
from .files import read_table
from .split import split_parameters

_FIRST = ("run_id", "r", "n_once", "n_rec", "n", "tokens", "loss")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTable:
    """Finished runs under one split.

    runs: one row a run: run_id, r, n_once and n_rec (under the split), n (the model's own n_once +
    n_rec, whatever the split), tokens, loss (nats per token), then every further column of the
    table. n_left_out: other runs by status. source: file name, for messages. loss_unit: nats or
    bits, what the losses were converted from.
    """

    runs: pd.DataFrame = field(repr=False)
    split: str
    loss: str
    source: str
    n_left_out: dict[str, int]
    loss_unit: str = "nats"

    @classmethod
    def of(cls, frame: pd.DataFrame, *, split: str = "text", loss: str = "val_loss") -> "RunTable":
        """Check a run table and apply a split (`split.SPLITS`) to its finished runs.

        `loss` is the column that will be fitted, nats per token. Raises ValueError naming row,
        column, value, rule and remedy.
        """
        refuse_bad_runs(frame, loss=loss)
        finished = frame[is_finished(frame)]
        n_once, n_rec = split_parameters(finished, split)
        own = {
            "run_id": finished["run_id"].astype(str).to_numpy(),
            "r": finished["recurrences"].to_numpy(dtype=float).astype(int),
            "n_once": n_once,
            "n_rec": n_rec,
            "n": finished["n_once"].to_numpy(dtype=float) + finished["n_rec"].to_numpy(dtype=float),
            "tokens": finished["tokens"].to_numpy(dtype=float),
            "loss": finished[loss].to_numpy(dtype=float),
        }
        others = finished.drop(columns=[name for name in _FIRST if name in finished])
        runs = pd.concat([pd.DataFrame(own), others.reset_index(drop=True)], axis=1)
        for name in ("budget_flops", "hidden_size", "train_flops_per_token", "seed"):
            if name in runs:
                runs[name] = runs[name].astype(float)
        return cls(
            runs=runs,
            split=split,
            loss=loss,
            source=str(frame.attrs.get("source", "the run table")),
            n_left_out=left_out(frame),
            loss_unit=str(frame.attrs.get("loss_unit", "nats")),
        )

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        split: str = "text",
        loss: str = "val_loss",
        loss_unit: str = "nats",
        drop: Sequence[str] = (),
        variant: str | None = None,
    ) -> "RunTable":
        """Read a .csv, .jsonl or .parquet file, or a directory of run directories (`runs.read_table`)."""
        frame = read_table(path, loss=loss, loss_unit=loss_unit, drop=drop, variant=variant)
        return cls.of(frame, split=split, loss=loss)

    def where(self, keep: Any) -> "RunTable":
        """Only the runs where `keep` (boolean, [n]) is true, under the same split."""
        runs = self.runs[np.asarray(keep, dtype=bool)].reset_index(drop=True)
        return replace(self, runs=runs)

    @property
    def design(self) -> Design:
        """The runs as the solver sees them."""
        return design_of(self.runs)

    def budgets(self) -> list[float]:
        """List the compute budgets, FLOPs, ascending; empty without budget_flops."""
        if "budget_flops" not in self.runs:
            return []
        return sorted(float(value) for value in self.runs["budget_flops"].dropna().unique())

    def __len__(self) -> int:
        return len(self.runs)


def design_of(runs: pd.DataFrame) -> Design:
    """Turn a table of runs into the solver's view."""
    columns = {
        name: runs[name].to_numpy(dtype=float)
        for name in ("n_once", "n_rec", "r", "tokens", "loss")
    }
    return Design.of(**columns, budget=_budgets(runs))


def unlooped_design(runs: pd.DataFrame, n: FloatArray) -> Design:
    """Turn a table of runs into the solver's view of unlooped models of n parameters, [n]."""
    tokens, loss = (runs[name].to_numpy(dtype=float) for name in ("tokens", "loss"))
    return Design.of(
        n_once=n,
        n_rec=np.zeros_like(n),
        r=np.ones_like(n),
        tokens=tokens,
        loss=loss,
        budget=_budgets(runs),
    )


def _budgets(runs: pd.DataFrame) -> FloatArray | None:
    """Training compute of every run, FLOPs, [n]; None where any run has none."""
    if "budget_flops" not in runs or runs["budget_flops"].isna().any():
        return None
    return runs["budget_flops"].to_numpy(dtype=float)


def as_table(data: RunTable | pd.DataFrame) -> RunTable:
    """Take a table as it is, a frame with the text's split and val_loss."""
    return data if isinstance(data, RunTable) else RunTable.of(data)
