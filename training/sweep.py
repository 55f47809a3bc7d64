"""`python -m training.sweep --grid NAME --out DIR`: plan a grid, run what is missing, write the run table.

On CPUs each core runs single-threaded runs in a process of its own (twice the throughput of one run on two threads); on
GPUs, or with --launch, each run is one `accelerate launch` after another; with --submit each is a job of a cluster.
Finished runs are skipped, half-finished ones resumed, failed ones tried again with --retry-failed. Several sweeps may
work on one folder, on one machine or many: each run is trained by one of them.

Exit status: 0 all finished or diverged, or in the hands of another sweep or of submitted jobs; 1 some failed; 2 bad
input; 130 interrupted. `python -m training.sweep status DIR` says where every run stands.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal

from . import status
from .claims import CLAIMED, holder
from .costs import MFU, PEAK_FLOPS, disk, free_bytes, needs, plan_table
from .data import check_tokens, prepare
from .grid import PlannedRun, expand, load_grid, plan
from .launch import ENDED, recipe_of, result, start, stop
from .ledger import write_plan, write_runs
from .loop import ended_record
from .messages import say
from .record import read_record
from .slurm import submit
from .workers import Outcome, run_here

FAILED_BEFORE = "failed before"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, plan, run, and write DIR/runs.csv."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["status"]:
        return status.main(arguments[1:])
    options = _parser().parse_intermixed_args(arguments)
    console = Console(stderr=True)
    # Both end the sweep with all states saved, also where a shell started it with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if options.jobs is not None and options.jobs < 1:
            raise ValueError(f"--jobs is {options.jobs}: at least one run at a time is needed.")
        out, launch = Path(options.out), options.launch or torch.cuda.is_available()
        runs = plan(expand(load_grid(options.grid), options.out, options.fields))
        jobs = len(runs) if options.submit else 1 if launch else options.jobs or os.cpu_count() or 1
        console.print(plan_table(runs, jobs))
        say(console, needs(runs, jobs, options.mfu, options.peak_flops))
        if options.dry_run:
            return 0
        if options.submit:
            return submit_grid(
                runs, out, options.submit, options.slurm, console, retry_failed=options.retry_failed
            )
        return run_grid(runs, out, jobs, launch, console, retry_failed=options.retry_failed)
    except (ValueError, OSError) as error:
        say(console, f"error: {error}", style="red")
        return 2
    except KeyboardInterrupt:
        say(console, "Interrupted. What ran is saved; the same command goes on from there.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.sweep",
        description="Train a grid of looped and unlooped models of equal executed depth.",
        epilog="python -m training.sweep status DIR says where every run of a folder stands.",
    )
    add = parser.add_argument
    add("--grid", required=True, metavar="NAME", help="a grid of training/grids, or a YAML file")
    add("--out", required=True, metavar="DIR", help="folder of the runs, their data and runs.csv")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--jobs", type=int, metavar="N", help="runs at a time on CPUs (default: one per core)")
    add("--launch", action="store_true", help="start each run with accelerate launch, as on GPUs")
    add("--retry-failed", action="store_true", help="try again what failed before")
    add("--submit", choices=("slurm", "local"), help="one job a run, through submitit")
    add(
        "--slurm",
        nargs="+",
        action="extend",
        default=[],
        metavar="key=value",
        help="of submitit's executor: timeout_min=240 gpus_per_node=8 slurm_partition=long …",
    )
    add(
        "--mfu", type=float, default=MFU, help=f"share of the peak for GPU-hours (default: {MFU:g})"
    )
    add(
        "--peak-flops",
        type=float,
        default=PEAK_FLOPS,
        metavar="F",
        help=f"FLOPs per second of a GPU (default: {PEAK_FLOPS:g}, an H100 in dense bfloat16)",
    )
    add(
        "fields",
        nargs="*",
        metavar="field=value",
        help="override the recipe, e.g. data.corpus=text; before --slurm",
    )
    return parser


def run_grid(
    runs: Sequence[PlannedRun],
    out: Path,
    jobs: int,
    launch: bool,
    console: Console,
    *,
    retry_failed: bool = False,
) -> int:
    """Run what has not ended, longest first, and write out/runs.csv; return the exit status."""
    missing, outcome = _begin(runs, out, jobs, retry_failed, console)
    try:
        outcome |= _launch_each(missing) if launch else run_here(missing, jobs, console)
    finally:
        write_runs(out)
    return _report(outcome, out, console)


def submit_grid(
    runs: Sequence[PlannedRun],
    out: Path,
    cluster: str,
    settings: Sequence[str],
    console: Console,
    *,
    retry_failed: bool = False,
) -> int:
    """Pack the data here and submit a job for each run that has not ended and that nobody trains; return the status."""
    missing, outcome = _begin(runs, out, len(runs), retry_failed, console)
    free = [run for run in missing if holder(run.config.folder) is None]
    jobs = submit(free, out, cluster, settings)
    write_runs(out)
    for run, job in zip(free, jobs, strict=True):
        say(console, f"job {job.job_id}: {run.config.name}")
    say(
        console,
        f"{len(jobs)} jobs submitted, {len(missing) - len(free)} runs are being trained already; logs in "
        f"{out / 'jobs'}. Where they stand: python -m training.sweep status {out}",
    )
    return 1 if FAILED_BEFORE in outcome.values() else 0


def _begin(
    runs: Sequence[PlannedRun], out: Path, jobs: int, retry_failed: bool, console: Console
) -> tuple[list[PlannedRun], Outcome]:
    """Check and prepare the data, write the plan; return what is to run, longest first, and what has ended."""
    data = runs[0].config.data
    if any(run.config.data != data for run in runs):
        raise ValueError(
            "data differs between variants: all runs of a grid must read the same rows."
        )
    outcome = {run.config.name: status for run in runs if (status := _ended_as(run, retry_failed))}
    missing = [run for run in runs if run.config.name not in outcome]
    missing.sort(key=lambda run: -run.seconds)
    need, free = disk(missing, jobs).peak, free_bytes(out)
    if need > free:
        say(
            console,
            f"The runs that are missing need {decimal(need)} of disk, and {out} has {decimal(free)} left. Free some, "
            "lower checkpoints_kept or --jobs, or choose another --out.",
            style="yellow",
        )
    packed = prepare(data, runs[0].config.data_folder, progress=True)
    check_tokens(packed, max(run.record["tokens"] for run in runs), data.allow_repeat)
    write_plan(runs, out)
    ended = sum(status in ENDED for status in outcome.values())
    if ended:
        say(console, f"{ended} of {len(runs)} runs have ended before and are skipped.")
    others = {path.parent.name for path in out.glob("*/run.json")} - {r.config.name for r in runs}
    if others:
        say(
            console,
            f"{len(others)} further runs in {out} are not of this grid, but will stand in its table: "
            f"{', '.join(sorted(others)[:3])}{', …' if len(others) > 3 else ''}",
            style="yellow",
        )
    return missing, outcome


def _ended_as(run: PlannedRun, retry_failed: bool) -> str | None:
    """How a run has ended before, if it has; another recipe's run has not, and is refused when trained."""
    try:
        record = ended_record(run.config)
    except ValueError:
        return None
    if record:
        return str(record["status"])
    failed = (read_record(run.config.folder) or {}).get("status") == "failed"
    return FAILED_BEFORE if failed and not retry_failed else None


def _report(outcome: Outcome, out: Path, console: Console) -> int:
    """Say what became of the runs; return the exit status."""

    def those(status: str) -> list[str]:
        return [name for name, found in outcome.items() if found == status]

    for name, text in outcome.items():
        if text not in (*ENDED, CLAIMED, FAILED_BEFORE):
            say(console, f"failed: {name}: {text}", style="red")
    for name in those("diverged"):
        say(console, f"diverged: {name}", style="yellow")
    if again := those(FAILED_BEFORE):
        say(
            console,
            f"{len(again)} runs failed before and were skipped ({', '.join(again[:3])}"
            f"{', …' if len(again) > 3 else ''}); --retry-failed tries them again.",
            style="red",
        )
    if claimed := those(CLAIMED):
        say(
            console,
            f"{len(claimed)} runs are being trained by another sweep: python -m training.sweep status {out}",
            style="yellow",
        )
    say(
        console,
        f"{len(those('finished'))} of {len(outcome)} runs finished; table in {out / 'runs.csv'}",
    )
    return 0 if set(outcome.values()) <= {*ENDED, CLAIMED} else 1


def _launch_each(runs: Sequence[PlannedRun]) -> Outcome:
    """Run one after another, each with `accelerate launch` on all devices it finds."""
    outcome: Outcome = {}
    command = [sys.executable, "-m", "accelerate.commands.launch", "-m", "training", "--config"]
    for run in runs:
        if holder(run.config.folder) is not None:
            outcome[run.config.name] = CLAIMED
            continue
        process = start([*command, str(recipe_of(run.config))])
        try:
            process.wait()
        except KeyboardInterrupt:
            stop(process, run.config.folder)
            process.wait()
            raise
        outcome[run.config.name] = result(run.config)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
