"""What the sweep does about its workers' deaths, claims and failures; the workers here train nothing."""

import io
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from tests.training import pretend_worker
from training import workers
from training.claims import ClaimedElsewhere
from training.loop import Interrupted
from training.workers import run_here


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """sweep(jobs, names…) → outcome, pids that tried each run in order, what was printed."""
    monkeypatch.setattr(workers, "_work", pretend_worker.work)

    def run(jobs, *names):
        configs = [SimpleNamespace(name=name, out=str(tmp_path)) for name in names]
        runs = [SimpleNamespace(config=config, seconds=1.0) for config in configs]
        stream = io.StringIO()
        outcome = run_here(runs, jobs, Console(file=stream, width=200))
        pids = {name: (tmp_path / name).read_text().split() for name in names}
        return outcome, pids, stream.getvalue()

    return run


def test_a_killed_worker_fails_its_own_run_alone_and_is_replaced(sweep):
    others = [f"run-{number}" for number in range(4)]
    outcome, pids, text = sweep(2, "killed", *others)
    assert {name: outcome[name] for name in others} == dict.fromkeys(others, "finished")
    assert "killed by SIGKILL (out of memory?)" in outcome["killed"]
    assert "its last state is kept" in outcome["killed"]
    assert len(set(pids["killed"])) == 2  # tried twice, by two processes
    assert "tried once more" in text


def test_a_run_whose_worker_dies_once_is_tried_again_when_the_others_have_been(sweep):
    outcome, pids, _ = sweep(1, "killed-once", "run-0", "run-1")
    assert set(outcome.values()) == {"finished"}
    assert pids["killed-once"][0] != pids["killed-once"][1] == pids["run-0"][0] == pids["run-1"][0]
    assert list(outcome) == ["run-0", "run-1", "killed-once"]


def test_a_worker_that_exits_is_named_with_its_status(sweep):
    outcome, _, _ = sweep(1, "exits")
    assert "its process exited with 3" in outcome["exits"]
    assert "memory" not in outcome["exits"]


def test_a_claimed_run_is_looked_at_once_more_at_the_end_and_not_waited_for(sweep):
    outcome, pids, _ = sweep(1, "claimed", "run-0")
    assert outcome == {"run-0": "finished", "claimed": "claimed elsewhere"}
    assert len(pids["claimed"]) == 2


def test_a_failing_run_is_tried_once_and_its_worker_goes_on(sweep):
    outcome, pids, _ = sweep(1, "fails", "run-0")
    assert outcome == {"fails": "ValueError: no", "run-0": "finished"}
    assert pids["fails"] == pids["run-0"]  # one worker, importing torch once


def test_workers_have_one_thread_each_and_the_sweep_keeps_its_own(sweep, monkeypatch):
    """Two runs of one thread are faster than one of two. OpenMP reads the variable when a process starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert sweep(1, "threads")[0] == {"threads": "1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_a_worker_trains_on_one_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(workers.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(workers.signal, "signal", Mock())
    ours, theirs = multiprocessing.Pipe()
    ours.send(None)
    workers._work(theirs)
    assert threads == [1]


def test_an_interrupt_stops_every_worker_and_waits_until_they_have_saved(sweep, tmp_path):
    def interrupt():
        while not (tmp_path / "long").is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sweep(1, "long", "run-0")
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert (tmp_path / "saved").is_file() and not (tmp_path / "run-0").exists()


@pytest.mark.parametrize("message", [None, "closed"])
def test_a_run_is_asked_to_stop_by_the_sweeps_word_and_by_its_death(monkeypatch, message):
    """Progress that nobody takes any more is no failure of the run."""
    ours, theirs = multiprocessing.Pipe()

    def train(config, on_progress, stop_asked):
        assert not stop_asked()
        ours.send(None) if message is None else ours.close()
        on_progress("step 1")
        assert stop_asked()
        raise Interrupted

    monkeypatch.setattr(workers, "train", train)
    assert workers._train(None, theirs) == ("ended", "interrupted")


def test_what_train_raises_is_told_apart(monkeypatch):
    _, theirs = multiprocessing.Pipe()
    for error, news in (
        (ClaimedElsewhere("by host"), ("claimed", "claimed elsewhere")),
        (ValueError("no corpus"), ("ended", "ValueError: no corpus")),
        (MemoryError("no memory"), ("ended", "MemoryError: no memory")),
    ):
        monkeypatch.setattr(workers, "train", Mock(side_effect=error))
        assert workers._train(None, theirs) == news
