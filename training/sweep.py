"""`python -m training.sweep --grid NAME --out DIR`: plan a grid, run what is missing, write the run table.

On CPUs each core runs single-threaded runs in a process of its own (twice the throughput of one run on two threads); on
GPUs, or with --launch, each run is one `accelerate launch` after another. Finished runs are skipped, half-finished ones
resumed, failed ones tried again. Exit status: 0 all finished or diverged, 1 some failed, 2 bad input, 130 interrupted.
"""

import argparse
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from scaling.runs import collect_runs, write_table

from .config import TrainingConfig, save_config
from .data import check_tokens, prepare
from .grid import PlannedRun, expand, load_grid, plan
from .loop import Interrupted, Progress, ended_record, train
from .record import read_record

Outcome = dict[str, str]  # run id → status, or the error's text
ENDED = ("finished", "diverged")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, plan, run, and write DIR/runs.csv."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    # Both end the sweep with all states saved, also where a shell started it with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if options.jobs is not None and options.jobs < 1:
            raise ValueError(f"--jobs is {options.jobs}: at least one run at a time is needed.")
        runs = plan(expand(load_grid(options.grid), options.out, options.fields))
        jobs = (
            1
            if options.launch or torch.cuda.is_available()
            else options.jobs or os.cpu_count() or 1
        )
        console.print(plan_table(runs, jobs))
        if options.dry_run:
            return 0
        return run_grid(
            runs, Path(options.out), jobs, options.launch or torch.cuda.is_available(), console
        )
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted. What ran is saved; the same command goes on from there.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.sweep",
        description="Train a grid of looped and unlooped models of equal executed depth.",
    )
    parser.add_argument(
        "--grid", required=True, metavar="NAME", help="a grid of training/grids, or a YAML file"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder of the runs, their data and runs.csv"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time on CPUs (default: one per core)"
    )
    parser.add_argument(
        "--launch", action="store_true", help="start each run with accelerate launch, as on GPUs"
    )
    parser.add_argument(
        "fields",
        nargs="*",
        metavar="field=value",
        help="override the recipe, e.g. data.corpus=text",
    )
    return parser


def plan_table(runs: Sequence[PlannedRun], jobs: int) -> Table:
    """Table of the plan: parameters, tokens, steps, FLOPs and estimated time of each run, and their sums."""
    total, flops = (
        sum(run.seconds for run in runs) / jobs,
        sum(run.record["total_flops"] for run in runs),
    )
    table = Table(
        title=f"{len(runs)} runs, {flops:.3g} FLOPs, about {_duration(total)} with {jobs} at a time",
        caption="N: parameters without embeddings and norms. Time: FLOPs at the rate measured for one layer here.",
    )
    for name in ("run", "N", "tokens", "steps", "FLOPs", "time"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for run in runs:
        record = run.record
        n = record["n_once"] + record["n_rec"]
        flops_of_run = f"{record['total_flops']:.3g}"
        table.add_row(
            run.config.name,
            f"{n:,}",
            f"{record['tokens']:,}",
            f"{record['steps']:,}",
            flops_of_run,
            _duration(run.seconds),
        )
    return table


def run_grid(
    runs: Sequence[PlannedRun], out: Path, jobs: int, launch: bool, console: Console
) -> int:
    """Run what has not ended, longest first, and write out/runs.csv; return the exit status."""
    data = runs[0].config.data
    if any(run.config.data != data for run in runs):
        raise ValueError(
            "data differs between variants: all runs of a grid must read the same rows."
        )
    packed = prepare(data, runs[0].config.data_folder, progress=True)
    check_tokens(packed, max(run.record["tokens"] for run in runs), data.allow_repeat)
    ended = {run.config.name: status for run in runs if (status := _ended_as(run))}
    missing = [run for run in runs if run.config.name not in ended]
    missing.sort(key=lambda run: -run.seconds)
    if ended:
        console.print(f"{len(ended)} of {len(runs)} runs have ended before and are skipped.")
    others = {path.parent.name for path in out.glob("*/run.json")} - {r.config.name for r in runs}
    if others:
        console.print(
            f"{len(others)} further runs in {out} are not of this grid, but will stand in its table: "
            f"{', '.join(sorted(others)[:3])}{', …' if len(others) > 3 else ''}",
            style="yellow",
        )
    try:
        outcome = _launch_each(missing) if launch else _run_in_pool(missing, jobs, console)
    finally:
        write_runs(out)
    outcome |= ended
    failed = {name: status for name, status in outcome.items() if status not in ENDED}
    diverged = [name for name, status in outcome.items() if status == "diverged"]
    for name, status in failed.items():
        console.print(f"failed: {name}: {status}", style="red", markup=False, highlight=False)
    for name in diverged:
        console.print(f"diverged: {name}", style="yellow", markup=False, highlight=False)
    finished = len(runs) - len(failed) - len(diverged)
    console.print(
        f"{finished} of {len(runs)} runs finished; table in {out / 'runs.csv'}", highlight=False
    )
    return 1 if failed else 0


def write_runs(out: Path) -> None:
    """Rebuild out/runs.csv from the run records, if there is any."""
    if any(out.glob("*/run.json")):
        write_table(collect_runs(out), out / "runs.csv")


def _ended_as(run: PlannedRun) -> str | None:
    """How a run has ended before, if it has; another recipe's run has not, and is refused when trained."""
    try:
        record = ended_record(run.config)
    except ValueError:
        return None
    return str(record["status"]) if record else None


def _launch_each(runs: Sequence[PlannedRun]) -> Outcome:
    """Run one after another, each with `accelerate launch` on all devices it finds."""
    outcome: Outcome = {}
    for run in runs:
        recipe = Path(run.config.out) / "recipes" / f"{run.config.name}.yaml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        save_config(run.config, recipe)
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "-m",
            "training",
            "--config",
            str(recipe),
        ]
        process = subprocess.Popen(command)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was interrupted too, and saves its state
            raise
        record = read_record(run.config.folder) or {"status": "failed"}
        status = record["status"]
        outcome[run.config.name] = (
            status if status in ENDED else record.get("error", "it ended without a record")
        )
    return outcome


def _run_in_pool(runs: Sequence[PlannedRun], jobs: int, console: Console) -> Outcome:
    """Run several at a time, each on one thread of a process of its own, with a bar for each and one for all."""
    context = multiprocessing.get_context("spawn")
    news, stop = context.Queue(), context.Event()
    outcome: Outcome = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with (
        _single_threaded(),
        ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_set_up_worker, initargs=(news, stop)
        ) as pool,
        Bars(*columns, console=console) as bars,
    ):
        board = _Board(bars, runs, jobs)
        pending: dict[Future[str], PlannedRun] = {
            pool.submit(_work, run.config): run for run in runs
        }
        try:
            while pending:
                done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                _drain(news, board.show)
                for future in done:
                    run = pending.pop(future)
                    outcome[run.config.name] = _result(future)
                    board.end(run)
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return outcome


def _result(future: "Future[str]") -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process, or one beside it, died (out of memory?); run the sweep again to go on"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _drain(news: Any, show: Callable[[str, Progress], None]) -> None:
    while True:
        try:
            show(*news.get_nowait())
        except queue.Empty:
            return


class _Board:
    """Bars of the running runs, and one for the whole grid weighted by FLOPs, with the time left."""

    def __init__(self, bars: Bars, runs: Sequence[PlannedRun], jobs: int) -> None:
        self.bars, self.jobs = bars, jobs
        self.seconds = {run.config.name: run.seconds for run in runs}
        self.done = dict.fromkeys(self.seconds, 0.0)  # share of each run
        self.tasks: dict[str, TaskID] = {}
        self.all = bars.add_task(
            "grid", total=max(sum(self.seconds.values()), 1e-9), state="starting"
        )

    def show(self, name: str, progress: Progress) -> None:
        """Update a run's bar."""
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, total=progress.steps, state="")
        state = (
            f"{progress.step}/{progress.steps} steps, loss {progress.loss:.3f}, "
            f"{progress.tokens_per_s:,.0f} tokens/s"
        )
        self.bars.update(self.tasks[name], completed=progress.step, state=state)
        self.done[name] = progress.step / progress.steps
        self._show_all()

    def end(self, run: PlannedRun) -> None:
        """Take away a run's bar."""
        self.done[run.config.name] = 1.0
        if run.config.name in self.tasks:
            self.bars.remove_task(self.tasks.pop(run.config.name))
        self._show_all()

    def _show_all(self) -> None:
        completed = sum(self.seconds[name] * share for name, share in self.done.items())
        total = sum(self.seconds.values())
        elapsed = self.bars.tasks[0].elapsed or 0.0
        left = elapsed * (total - completed) / completed if completed else total / self.jobs
        ended = sum(share == 1.0 for share in self.done.values())
        self.bars.update(
            self.all,
            completed=completed,
            state=f"{ended}/{len(self.done)} runs, about {_duration(left)} left",
        )


_news: Any = None
_stop: Any = None


def _set_up_worker(news: Any, stop: Any) -> None:
    """Prepare a worker process: one thread; interrupts reach it through the parent's `stop`."""
    global _news, _stop
    _news, _stop = news, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore", UserWarning)  # the plan has shown them
    torch.set_num_threads(1)


def _work(config: TrainingConfig) -> str:
    """Train one run in a worker; returns its status."""
    try:
        if _stop_asked():
            return "interrupted"
        record = train(config, lambda progress: _news.put((config.name, progress)), _stop_asked)
        return str(record["status"])
    except Interrupted:
        return "interrupted"
    finally:
        if _orphaned():
            os._exit(1)  # nobody is left to take the result or to hand out more


def _stop_asked() -> bool:
    """Whether the sweep was interrupted, or was killed and leaves this worker behind."""
    return bool(_stop.is_set()) or _orphaned()


def _orphaned() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


@contextmanager
def _single_threaded() -> Any:
    """Environment that child processes start with: one thread each for OpenMP, BLAS and tokenizers."""
    names = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


if __name__ == "__main__":
    sys.exit(main())
