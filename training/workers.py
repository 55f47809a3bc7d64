"""Runs on this machine: worker processes of one thread each, with a bar for each run and one for all.

One process of two threads is slower than two of one thread (1.4 to 2 times), so each core trains a run of its own. A
worker lives from run to run, since importing torch takes seconds, and talks through a pipe of its own: unlike a shared
queue or event, a worker that is killed cannot leave it locked for the others.
"""

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from .claims import CLAIMED, ClaimedElsewhere
from .config import TrainingConfig
from .costs import duration
from .grid import PlannedRun
from .loop import Interrupted, Progress, train
from .messages import say

Outcome = dict[str, str]  # run id → status, or the error's text
# "progress", Progress; "ended", status or error; "claimed" and "died", in words.
News = tuple[str, Any]


def run_here(runs: Sequence[PlannedRun], jobs: int, console: Console) -> Outcome:
    """Run `jobs` at a time in the order given, each on one thread of a process of its own.

    A run whose worker dies is tried once more from its last state, and one that another process has claimed is looked
    at once more, when the others have been started; KeyboardInterrupt is passed on when all states are saved.
    """
    waiting, again, outcome = deque(runs), set[str](), Outcome()
    with _single_threaded(), _bars(console) as bars:
        board = _Board(bars, runs, jobs)
        workers: list[_Worker] = []
        try:
            for _ in range(min(jobs, len(runs))):
                workers.append(_Worker())
            while waiting or any(worker.run for worker in workers):
                for worker in workers:
                    if worker.run is None and waiting:
                        worker.start(waiting.popleft())
                for worker in _that_spoke(workers):
                    run = worker.run
                    kind, news = worker.hear()
                    if run is None:
                        continue  # it died between two runs, and has been replaced
                    name = run.config.name
                    if kind == "progress":
                        board.show(name, news)
                    elif kind in ("died", "claimed") and name not in again:
                        again.add(name)
                        waiting.append(run)
                        board.pause(name)
                        if kind == "died":
                            say(console, f"{name}: {news}. It is tried once more.", style="yellow")
                    else:
                        outcome[name] = news
                        board.end(name)
        finally:
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.join()
    return outcome


class _Worker:
    """A worker process as the sweep sees it: its pipe and the run that it has, replaced when it dies."""

    def __init__(self) -> None:
        self.run: PlannedRun | None = None
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,))
        self.process.start()
        theirs.close()  # so that the pipe ends with the process

    def start(self, run: PlannedRun) -> None:
        """Hand it a run."""
        self.run = run
        with _may_be_dead():
            self.pipe.send(run.config)

    def hear(self) -> News:
        """Take its next message; where its process has died, how, and put another in its place."""
        try:
            news: News = self.pipe.recv()
        except (EOFError, OSError):
            news = ("died", self._death())
            self.pipe.close()
            self._begin()
        if news[0] != "progress":
            self.run = None
        return news

    def _death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        return (
            f"its process {how}{memory}; its last state is kept, and the next sweep goes on from it"
        )

    def stop(self) -> None:
        """Ask it to save its state, if it trains, and to end."""
        with _may_be_dead():
            self.pipe.send(None)

    def join(self) -> None:
        """Wait for its end; what it still says is dropped, lest it wait for a reader."""
        with _may_be_dead():
            while True:
                self.pipe.recv()
        self.process.join()
        self.pipe.close()


def _that_spoke(workers: Sequence[_Worker]) -> list[_Worker]:
    by_pipe = {worker.pipe: worker for worker in workers}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout=0.5)]  # type: ignore[index]


@contextmanager
def _may_be_dead() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        pass


def _work(pipe: Connection) -> None:
    """Train what comes through the pipe. Anything that comes during a run, its end included, asks to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep is asked, and asks its workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore", UserWarning)  # the plan has shown them
    torch.set_num_threads(1)
    with _may_be_dead():  # then nobody is left to take a result or to hand out more
        while (config := pipe.recv()) is not None:
            pipe.send(_train(config, pipe))


def _train(config: TrainingConfig, pipe: Connection) -> News:
    """Train one run and say how it ended."""

    def tell(progress: Progress) -> None:
        with _may_be_dead():  # no failure of the run: it is asked next whether to stop
            pipe.send(("progress", progress))

    try:
        return "ended", train(config, tell, pipe.poll)["status"]
    except Interrupted:
        return "ended", "interrupted"
    except ClaimedElsewhere:
        return "claimed", CLAIMED
    except Exception as error:
        return "ended", f"{type(error).__name__}: {error}"


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    )


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

    def pause(self, name: str) -> None:
        """Take away the bar of a run that waits for its second try."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))

    def end(self, name: str) -> None:
        """Take away the bar of a run that is over."""
        self.pause(name)
        self.done[name] = 1.0
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
            state=f"{ended}/{len(self.done)} runs, about {duration(left)} left",
        )


@contextmanager
def _single_threaded() -> Iterator[None]:
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
