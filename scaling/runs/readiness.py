"""Which fits a table is ready for, and what each of the others lacks."""

from dataclasses import dataclass

import pandas as pd

from ..solver.identify import refuse_unidentifiable
from .checks import is_finished, left_out, refuse_bad_runs
from .seeds import seed_spread
from .table import RunTable


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """One thing to be done with a table, and what is missing for it (None: nothing)."""

    name: str
    missing: str | None


def check_table(frame: pd.DataFrame, *, loss: str = "val_loss") -> tuple[Readiness, ...]:
    """Say what a table is ready for. Raises ValueError when it is unfit for every fit."""
    refuse_bad_runs(frame, loss=loss)
    runs = frame[is_finished(frame)]
    others = ", ".join(f"{count} {status}" for status, count in left_out(frame).items()) or "none"
    out = [Readiness(name=f"{len(runs)} finished runs; left out: {others}", missing=None)]
    for split in ("text", "once", "regression"):
        out.append(
            Readiness(name=f"joint law, --split {split}", missing=_refusal(frame, split, loss))
        )
    budgets = _absent(runs, "budget_flops")
    out.append(Readiness(name="interval of φ", missing=budgets))
    out.append(Readiness(name="iso-FLOPs minima", missing=budgets))
    out.append(
        Readiness(
            name="frontier",
            missing=_absent(runs, "budget_flops", "hidden_size", "train_flops_per_token"),
        )
    )
    repeated = (
        _refusal(frame, "text", loss) is None
        and seed_spread(RunTable.of(frame, loss=loss).runs) is not None
    )
    out.append(
        Readiness(
            name="seed spread",
            missing=None if repeated else "several runs (seeds) of the same budget, r and width",
        )
    )
    for column in [str(name) for name in frame.columns if str(name).startswith("loss/")]:
        out.append(Readiness(name=f"--loss {column}", missing=_absent(runs, column)))
    return tuple(out)


def _refusal(frame: pd.DataFrame, split: str, loss: str) -> str | None:
    try:
        refuse_unidentifiable(RunTable.of(frame, split=split, loss=loss).design, None)
    except ValueError as error:
        return str(error)
    return None


def _absent(runs: pd.DataFrame, *columns: str) -> str | None:
    gaps = []
    for name in columns:
        if name not in runs:
            gaps.append(f"column {name}")
        elif runs[name].isna().any():
            gaps.append(f"{name} of {int(runs[name].isna().sum())} runs")
    return ", ".join(gaps) or None
