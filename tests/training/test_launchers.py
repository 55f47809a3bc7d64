"""A launcher that dies of a signal leaves a training that saves its state and ends, not an orphan that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import training
from training.claims import holder
from training.config import save_config
from training.record import read_record

ROOT = Path(training.__file__).parents[1]
LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}


def wait_for(what, why, seconds=120):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"waited {seconds} s for {why}"
        time.sleep(0.05)
    return found


@pytest.fixture
def launched(recipe, tmp_path):
    """Starts an endless run under a launcher; gives its config, the launcher and the processes below it."""
    config = recipe(
        "orphan",
        f"out={tmp_path}",
        "steps=100000",
        "checkpoint_every=2",
        "data.allow_repeat=true",
    )
    save_config(config, tmp_path / "recipe.yaml")
    log, started = config.folder / "log.jsonl", []

    def start(launcher):
        process = subprocess.Popen(
            [sys.executable, *LAUNCHERS[launcher], "-m", "training"]
            + ["--config", str(tmp_path / "recipe.yaml")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        wait_for(lambda: log.is_file() and log.read_text().count("\n") > 3, "four steps")
        family = psutil.Process(process.pid).children(recursive=True)
        started.extend(family)
        return config, process, family

    yield start
    for one in started:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            one.kill()


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("accelerate", signal.SIGTERM), ("torchrun", signal.SIGUSR1), ("accelerate", signal.SIGKILL)],
)
def test_a_training_without_its_launcher_saves_its_state_and_ends(launched, launcher, number):
    config, process, family = launched(launcher)
    process.send_signal(number)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "the training outlived its launcher"
    assert holder(config.folder) is None
    states = sorted((config.folder / "state").iterdir())
    last = (config.folder / "log.jsonl").read_text().splitlines()[-1]
    assert states[-1].name == f"step-{json.loads(last)['step']:09d}"


def test_a_process_that_is_killed_ends_the_others_and_the_run_still_counts_as_running(launched):
    """Which process is lost must not matter: the record says `running`, so that the next sweep goes on."""
    config, process, family = launched("torchrun")
    ranks = {one.environ().get("RANK"): one for one in family if "RANK" in one.environ()}
    ranks["1"].kill()
    process.wait(timeout=120)
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert read_record(config.folder)["status"] == "running"
    assert holder(config.folder) is None
