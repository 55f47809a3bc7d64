"""Trainings below a launcher that hands on nothing are asked to save, and waited for; they train nothing here."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import training
from tests.training import pretend_training
from training.claims import claim, holder
from training.config import save_config
from training.launch import result, start, stop

ROOT = Path(training.__file__).parents[1]


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """launch(steps) → process of a training below a launcher, and its folder; what is left at the end is killed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder, processes = tmp_path / "runs" / "run", []

    def begin(steps, *launcher):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "steps").write_text(str(steps))
        processes.append(start([sys.executable, pretend_training.__file__, *launcher, str(folder)]))
        return processes[-1], folder

    yield begin
    for process in processes:
        stop(process, folder, 0)
        process.wait()


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("launcher", [(), ("--launcher",)], ids=["alone", "below a launcher"])
def test_a_training_saves_its_state_when_stopped_wherever_it_stands(launch, launcher):
    process, folder = launch(10**6, *launcher)
    wait_until(lambda: (folder / "run.json").is_file())
    members = psutil.Process(process.pid).children(recursive=True)
    stop(process, folder)
    assert int((folder / "saved").read_text()) > 0
    process.wait()
    assert holder(folder) is None and not any(member.is_running() for member in members)


def test_signals_to_all_processes_at_once_break_no_saving(launch):
    """Slurm may send SIGTERM and submitit's SIGUSR2 to every process of a job; the launcher must outlive both."""
    process, folder = launch(10**6, "--launcher")
    wait_until(lambda: (folder / "run.json").is_file())
    for member in (
        *psutil.Process(process.pid).children(recursive=True),
        psutil.Process(process.pid),
    ):
        member.send_signal(signal.SIGUSR2)
        member.send_signal(signal.SIGTERM)
    stop(process, folder)
    assert int((folder / "saved").read_text()) > 0
    process.wait()


def test_a_training_without_a_claim_is_not_waited_for(launch):
    """While torch is being imported a signal would be lost, and there is nothing to save."""
    code = "import time, signal; time.sleep(60)"
    process = start([sys.executable, "-c", code])
    begin = time.monotonic()
    stop(process, Path("nowhere") / "run")
    assert process.wait(10) == -signal.SIGKILL and time.monotonic() - begin < 10


def test_one_that_does_not_save_in_time_is_killed(launch):
    process, folder = launch(10**6)
    wait_until(lambda: (folder / "run.json").is_file())
    os.kill(process.pid, signal.SIGSTOP)
    stop(process, folder, patience_s=0.3)
    process.wait(10)
    assert not (folder / "saved").exists() and holder(folder) is None


def test_a_claim_of_another_process_is_left_alone(launch, tmp_path):
    """The training that was started has found the run claimed and ends; the other one must not be asked to stop."""
    process = start([sys.executable, "-c", "import time; time.sleep(60)"])
    folder = tmp_path / "run"
    with claim(folder):  # this process would die of SIGUSR1
        stop(process, folder)
        assert holder(folder).pid == os.getpid()
    process.wait(10)


def test_the_terminals_interrupt_does_not_reach_the_training(launch):
    process, folder = launch(10**6)
    assert os.getpgid(process.pid) != os.getpgid(0)


def test_the_result_is_what_the_record_says(recipe, tmp_path):
    config = recipe("run", f"out={tmp_path}")
    config.folder.mkdir()
    save_config(config, config.folder / "config.yaml")
    assert "without a result" in result(config)
    for record, expected in (
        ({"status": "finished"}, "finished"),
        ({"status": "diverged"}, "diverged"),
        ({"status": "failed", "error": "ValueError: no"}, "ValueError: no"),
    ):
        pretend_training.write(config.folder, **record)
        assert result(config) == expected
    pretend_training.write(config.folder, status="running")
    assert "goes on from its last state" in result(config)
    with claim(config.folder):
        assert result(config) == "claimed elsewhere"


def test_a_finished_run_of_another_recipe_is_no_result(recipe, tmp_path):
    config = recipe("run", f"out={tmp_path}")
    config.folder.mkdir()
    save_config(replace(config, seed=99), config.folder / "config.yaml")
    pretend_training.write(config.folder, status="finished")
    assert "another recipe" in result(config)
