"""What a sweep's folder says of all its runs: plan.json before they run, runs.csv after.

Several sweeps and jobs may share a folder, so both are written under a lock.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from scaling.runs import collect_runs, write_table

from .files import write_text

if TYPE_CHECKING:  # `status` is quick without torch
    from .grid import PlannedRun

PLANNED = ("steps", "batch_tokens", "total_flops")


def write_plan(runs: Sequence["PlannedRun"], out: Path) -> None:
    """Add runs to out/plan.json: steps, tokens of a step, FLOPs, and estimated seconds of each."""
    out.mkdir(parents=True, exist_ok=True)
    planned = {
        run.config.name: {name: run.record[name] for name in PLANNED} | {"seconds": run.seconds}
        for run in runs
    }
    with FileLock(out / ".plan.json.lock"):
        write_text(out / "plan.json", json.dumps(read_plan(out) | planned, indent=1))


def read_plan(out: Path) -> dict[str, dict[str, Any]]:
    """Return what out/plan.json says of each run, nothing if there is no plan."""
    path = out / "plan.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def write_runs(out: Path) -> None:
    """Rebuild out/runs.csv from the run records, if there is any."""
    if any(out.glob("*/run.json")):
        with FileLock(out / ".runs.csv.lock"):
            write_table(collect_runs(out), out / "runs.csv")
