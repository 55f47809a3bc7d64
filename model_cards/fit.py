"""φ of a run's grid: find the JSON of its fit, and check as far as it tells that it is of the run's table."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling.runs import collect_runs, is_finished, read_raw

from .run import is_number, read_json

# What the card needs of `python -m scaling fit TABLE --json FILE`.
FIELDS = (
    "phi phi_ci split split_meaning loss source n_runs interval residuals isoflops seed_spread warnings"
).split()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit and where it comes from.

    numbers: its JSON. file, table: names, without the folders of the machine. n_in_table: finished runs of the table
    now, None where the table was not found. worth: r^φ of the run, how often its shared block counts.
    """

    numbers: Mapping[str, Any]
    file: str
    table: str
    n_in_table: int | None
    worth: float


def find_fit(run_dir: Path, record: Mapping[str, Any]) -> Fit | None:
    """Read fit.json in the folder above the run, or in one beside it, if it is of the run's table.

    One that isn't is left out with a warning. Raises ValueError if several are: none is more right than another.
    """
    above = run_dir.resolve().parent
    fits = {}
    for path in (above / "fit.json", *sorted(above.glob("*/fit.json"))):
        if path.is_file():
            try:
                fits[path] = read_fit(path, record)
            except ValueError as error:
                warnings.warn(f"not used for the card: {error}", stacklevel=2)
    if len(fits) > 1:
        raise ValueError(
            f"several fits are of this run's table: {', '.join(map(str, fits))}. Name one with --fit."
        )
    return next(iter(fits.values()), None)


def read_fit(path: Path, record: Mapping[str, Any]) -> Fit:
    """Read the JSON of a fit. Raises ValueError if it is none, or of other runs."""
    value = read_json(path)
    missing = [name for name in FIELDS if name not in value]
    if missing or not is_number(value["phi"]):
        raise ValueError(
            f"{path} is no fit: {(missing or ['phi'])[0]} is missing. Write one with python -m scaling fit TABLE "
            "--json FILE."
        )
    _refuse_other_cells(path, value, record)
    source = Path(value["source"])
    table = next(_tables(path.resolve().parent, source), None)
    public = {
        "warnings": [text.replace(value["source"], source.name) for text in value["warnings"]]
    }
    return Fit(
        numbers=value | public,
        file=f"{path.resolve().parent.name}/{path.name}",
        table=source.name,
        n_in_table=None if table is None else _count_with(table, path, record),
        worth=record["recurrences"] ** value["phi"],
    )


def _refuse_other_cells(path: Path, value: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Refuse a fit without runs of this run's r, or of its budget at that r."""
    r, budget = record["recurrences"], record["budget_flops"]
    rs = sorted({row["r"] for row in value["residuals"]})
    if r not in rs:
        raise ValueError(
            f"{path} is a fit of r = {rs}, but the run has r = {r}. Fit its own table."
        )
    budgets = sorted({cell["budget_flops"] for cell in value["isoflops"] if cell["r"] == r})
    if budgets and not any(math.isclose(budget, one) for one in budgets):
        raise ValueError(
            f"{path} is a fit of budgets of {budgets} FLOPs at r = {r}, but the run's is {budget}. Fit its own table."
        )


def _tables(folder: Path, source: Path) -> Iterator[Path]:
    """Where the table may be: beside the fit, the fit's own folder, or where the fit found it."""
    own = [folder] if folder.name == source.name else []
    for place in (folder / source.name, *own, source):
        if place.is_file() or any(place.glob("*/run.json")):
            yield place


def _count_with(table: Path, path: Path, record: Mapping[str, Any]) -> int:
    """Count the finished runs of a table; refuse one without this run."""
    frame = collect_runs(table) if table.is_dir() else read_raw(table)
    run_id, loss = record["run_id"], record["val_loss"]
    rows = frame.reindex(columns=["run_id", "val_loss"]).astype({"run_id": str})
    found = rows.loc[rows["run_id"] == run_id, "val_loss"].tolist()
    if not found:
        raise ValueError(
            f"{path} is a fit of {table}, which has no run {run_id}. Fit its own table."
        )
    if not math.isclose(found[0], loss, rel_tol=1e-9):  # CSV is read to the last digit but one
        raise ValueError(
            f"{path} is a fit of {table}, where {run_id} has val_loss = {found[0]}; the run itself has {loss}. Fit its "
            "own table."
        )
    return int(is_finished(frame).sum())
