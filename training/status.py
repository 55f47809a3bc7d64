"""`python -m training.sweep status DIR`: where every run of a sweep's folder stands.

Read from plan.json, the run records, the last whole lines of the logs, and the claims; nothing is written and no run is
disturbed, so it may be asked from anywhere that sees the folder. `python -m training.status DIR` is the same, without
the seconds that importing torch takes.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from .claims import holder
from .costs import duration
from .ledger import read_plan
from .messages import say

# In the order of the table: what needs a look comes first.
COLOURS = {
    "running": "cyan",
    "failed": "red",
    "diverged": "magenta",
    "interrupted": "yellow",
    "waiting": "dim",
    "done": "green",
}
TAIL = 65_536  # bytes of a log that are read


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One run: its state, what there is to say of it, and its seconds: estimated at first, taken, and still to go.

    `left` is 0 for a run that is over.
    """

    run_id: str
    state: str
    words: str
    planned: float | None = None
    taken: float | None = None
    left: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, again and again on a terminal; exit status 0, 2 if the folder has no runs."""
    parser = argparse.ArgumentParser(
        prog="python -m training.sweep status", description="Where every run of a sweep stands."
    )
    parser.add_argument("out", type=Path, metavar="DIR", help="folder of the runs")
    parser.add_argument("--once", action="store_true", help="print it once, also on a terminal")
    parser.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="how often to look (default: 5)"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if not look(options.out):
        say(
            Console(stderr=True),
            f"error: {options.out} holds no runs and no plan.json. Give the --out of a sweep.",
            style="red",
        )
        return 2
    if options.once or not console.is_terminal:
        console.print(status_table(look(options.out)))
        return 0
    try:
        with Live(status_table(look(options.out)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(max(options.every, 0.1))
                live.update(status_table(look(options.out)), refresh=True)
    except KeyboardInterrupt:
        return 0


def look(out: Path) -> list[RunStatus]:
    """Status of every run that out/plan.json plans or that has a record in `out`, by state and then as planned."""
    plan = read_plan(out)
    others = sorted(path.parent.name for path in out.glob("*/run.json"))
    runs = [_look_at(out / name, plan.get(name, {})) for name in dict.fromkeys([*plan, *others])]
    order = list(COLOURS)
    return sorted(runs, key=lambda run: order.index(run.state))


def _look_at(folder: Path, plan: dict[str, Any]) -> RunStatus:
    path = folder / "run.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    state, words, left = _state(folder, record, plan)
    planned, taken = plan.get("seconds"), record.get("wall_s")
    return RunStatus(
        run_id=folder.name, state=state, words=words, planned=planned, taken=taken, left=left
    )


def _state(folder: Path, record: dict[str, Any], plan: dict[str, Any]) -> tuple[str, str, float]:
    """State, what there is to say of it, and seconds left."""
    status = record.get("status")
    if status == "finished":
        return "done", f"val_loss {record['val_loss']:.4f}", 0.0
    if status == "diverged":
        return "diverged", f"at step {record.get('diverged_step', '?')}", 0.0
    held = holder(folder)
    if held is None and status == "failed":
        return "failed", str(record.get("error", "no reason given")), 0.0
    known = plan | record
    entry = last_entry(folder / "timing.jsonl") | last_entry(folder / "log.jsonl")
    step, steps, speed = entry.get("step", 0), known.get("steps", 0), entry.get("tokens_per_s")
    left = plan.get("seconds", 0.0) * (1 - step / steps if steps else 1.0)
    if speed and steps:
        left = (steps - step) * known["batch_tokens"] / speed
    words = [f"{step:,}/{steps:,} steps"]
    if held is None:
        return ("interrupted", words[0], left) if record else ("waiting", "", left)
    if "loss" in entry:
        words.append(f"loss {entry['loss']:.3f}")
    if speed:
        words.append(f"{speed:,.0f} tokens/s")
    return "running", ", ".join([*words, f"{duration(left)} left", str(held)]), left


def last_entry(path: Path) -> dict[str, Any]:
    """Return the last whole line of a JSONL file, {} if there is none; a torn end is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            return entry
    return {}


def time_left(runs: Sequence[RunStatus]) -> float | None:
    """Seconds until all runs are over if as many go on running as now; None if none runs.

    Estimates of runs that have not logged a speed are scaled by what the ended ones took.
    """
    running = [run for run in runs if run.state == "running"]
    if not running:
        return None
    over = [run for run in runs if run.state == "done" and run.taken and run.planned]
    factor = sum(r.taken or 0 for r in over) / sum(r.planned or 0 for r in over) if over else 1.0
    total = sum(run.left * (factor if run.state == "waiting" else 1.0) for run in runs)
    return max(total / len(running), *(run.left for run in running))


def status_table(runs: Sequence[RunStatus]) -> Group:
    """Sum and table of `look`."""
    counts = Counter(run.state for run in runs)
    sums = ", ".join(f"{counts[state]} {state}" for state in COLOURS if counts[state])
    left = time_left(runs)
    ending = f"about {duration(left)} left" if left is not None else "nothing is running"
    table = Table("run", "state", Column(overflow="fold"))
    for run in runs:
        table.add_row(run.run_id, Text(run.state, style=COLOURS[run.state]), Text(run.words))
    return Group(Text(f"{len(runs)} runs: {sums}; {ending}"), table)


if __name__ == "__main__":
    sys.exit(main())
